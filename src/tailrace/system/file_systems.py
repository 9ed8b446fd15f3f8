"""Which file system a path is on. SQLite needs locks and shared memory that network file systems do not have, or only
between processes of one machine."""

from __future__ import annotations

import errno
import logging
import re
import sqlite3
from contextlib import suppress
from pathlib import Path

__all__ = ["NEEDS_LOCAL_DISK", "lacks_locks", "network_file_system", "warn_of_network"]

logger = logging.getLogger("tailrace")

NEEDS_LOCAL_DISK = (
    "Either another program has locked it, or its file system lacks the locks and the shared memory that SQLite needs, "
    "as network file systems do: use a local disk."
)
_NETWORK = {
    "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs",
    "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs",
}  # fmt: skip
_MOUNTS = Path("/proc/self/mountinfo")  # Linux; elsewhere nothing is known
_ESCAPE = re.compile(r"\\([0-7]{3})")  # of a space, for example


def network_file_system(path: Path, mounts: str) -> str:
    """Return the kind of network file system that a path is on, such as nfs4; "" for another file system.

    `mounts` is the content of /proc/self/mountinfo. *Source:* proc_pid_mountinfo(5).
    """
    nearest, kind = -1, ""
    for line in mounts.splitlines():
        mount, _, about = line.partition(" - ")
        if len(fields := mount.split(" ")) > 4 and about:
            point = Path(_ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[4]))
            if path.is_relative_to(point) and len(point.parts) >= nearest:  # of two at one path, the later one counts
                nearest, kind = len(point.parts), about.split(" ")[0]
    return kind if kind in _NETWORK else ""


def lacks_locks(error: BaseException | None) -> bool:
    """Return whether an error of SQLite or of the system may come from a file system without locks or shared memory."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_IOERR)


def warn_of_network(path: Path) -> None:
    """Write a line to the log if an SQLite file is on a network file system."""
    with suppress(OSError):
        if kind := network_file_system(path.resolve(), _MOUNTS.read_text("utf-8", "surrogateescape")):
            text = "%s is on a network file system (%s), on which SQLite may fail or lose data. Use a local disk."
            logger.warning(text, path, kind)
