/* What a test preloads into a server: a wall clock that somebody sets, a disk that does not sync, and one without locks.
 *
 * FAULT_CLOCK names a file with the seconds that the clock is off; FAULT_SYNC and FAULT_LOCKS name files that make syncs,
 * or locks of SQLite's files, fail by being there.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void) {
    const char *path = getenv("FAULT_CLOCK");
    FILE *file = path ? fopen(path, "r") : NULL;
    long seconds = 0;
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
        fclose(file);
    }
    return seconds;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += offset_s();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}

static int is_failing(void) {
    const char *path = getenv("FAULT_SYNC");
    if (!path || access(path, F_OK)) return 0;
    errno = EIO;
    return 1;
}

int fdatasync(int descriptor) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
    return is_failing() ? -1 : real(descriptor);
}

int fsync(int descriptor) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    return is_failing() ? -1 : real(descriptor);
}

static int is_unlockable(int descriptor) {
    const char *path = getenv("FAULT_LOCKS");
    char link[64], name[512];
    if (!path || access(path, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length < 0) return 0;
    name[length] = 0;
    return strstr(name, ".sqlite") != NULL;
}

int fcntl64(int descriptor, int command, ...) {
    static int (*real)(int, int, ...);
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (!real) real = dlsym(RTLD_NEXT, "fcntl64");
    if ((command == F_SETLK || command == F_SETLKW) && is_unlockable(descriptor)) {
        errno = ENOLCK;
        return -1;
    }
    return real(descriptor, command, argument);
}

int fcntl(int descriptor, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    return fcntl64(descriptor, command, argument);
}
