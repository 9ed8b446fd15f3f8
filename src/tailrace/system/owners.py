"""Who owns what tailrace creates. With sudo, root creates files in the directory of a server that runs as another user.
That user gets them, because the server could not open them otherwise.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["create_file", "give_tree", "make_directory"]


def create_file(path: Path) -> None:
    """Create an empty file that only its owner can read, unless it exists. Root gives it to the owner of its directory.

    Raises: OSError.
    """
    try:
        # O_EXCL follows no symbolic link, so that nobody gets a file from elsewhere.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        if os.geteuid() == 0:
            with suppress(OSError):  # as in `give_tree`
                owner = path.parent.stat()
                os.chown(descriptor, owner.st_uid, owner.st_gid)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, unless they exist. Root gives a new one to the owner of the one above.

    Raises: OSError.
    """
    if not path.parent.exists():
        make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        give_tree(path, path.parent)


def give_tree(new: Path, like: Path) -> None:
    """As root, give a directory that this process has made, and all that is in it, to the owner of another one.

    What root may not give away stays as it is: a container can take this right from root, and some file systems have no
    owners.
    """
    if os.geteuid() != 0:
        return
    with suppress(OSError):
        owner = like.stat()
        for _, _, files, descriptor in os.fwalk(new, topdown=False):
            for name in files:
                os.chown(name, owner.st_uid, owner.st_gid, dir_fd=descriptor, follow_symlinks=False)
            os.chown(descriptor, owner.st_uid, owner.st_gid)
