"""Downloads one large file of the hub into the hub's cache, so that an interrupted download continues where it was.

The hub's library resumes a download only within its own process (looked at in 2.4; 1.2 kept partial files): after
Ctrl-C it begins again. Here the bytes go to `SHA256.tailrace-part` beside the cache's blobs, and become the blob
`SHA256` if their hash is right. The library then finds the blob and only links to it. Its guide on the cache
describes this layout. The requests are those of the library's own client, with its proxies, certificates and token.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from pathlib import Path
from typing import IO

from tailrace.errors import ModelError
from tailrace.models.progress import Progress, task

__all__ = ["download", "num_missing_bytes"]

_CHUNK_BYTES = 1 << 20
_TRIES = 5  # without a new byte
_PAUSE_S = 1.0
_QUIET_S = 30.0  # a connection without a byte for so long is broken


def download(url: str, blob: Path, num_bytes: int, sha256: str, progress: Progress) -> None:
    """Download a file to `blob`, unless it is there. Waits if another process is downloading it.

    *Cancellation:* keeps the partial file. *Raises:* ModelError if the hash is wrong; the hub library's exceptions.
    """
    if blob.is_file():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = _part_of(blob)
    name = url.rpartition("/")[2]
    with part.open("a+b") as target:
        _lock(target, name, progress)
        if blob.is_file():
            part.unlink(missing_ok=True)  # made after the other process renamed its own
            return
        if target.tell() > num_bytes:
            _empty(target)
        with task(progress, f"Fetching {name}", num_bytes):
            progress.advance(target.tell())
            _fill(url, target, num_bytes, progress)
        with task(progress, f"Checking {name}", num_bytes):
            digest = _digest(target, progress)
        if digest != sha256:
            _empty(target)  # and not deleted: another process may wait for its lock
            raise ModelError(
                f"{name} arrived with a wrong checksum: it was altered or damaged on its way. Nothing was kept. "
                "Try again; if it happens again, do not trust the mirror in HF_ENDPOINT."
            )
        part.replace(blob)


def num_missing_bytes(blob: Path, num_bytes: int) -> int:
    """Return how many bytes of a file of this size `download` has to write."""
    if blob.is_file():
        return 0
    part = _part_of(blob)
    return num_bytes - min(num_bytes, part.stat().st_size if part.is_file() else 0)


def _part_of(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.tailrace-part")


def _empty(target: IO[bytes]) -> None:
    target.seek(0)
    target.truncate()


def _digest(target: IO[bytes], progress: Progress) -> str:
    """Return the SHA-256 of a whole file."""
    digest = hashlib.sha256()
    target.seek(0)
    while chunk := target.read(_CHUNK_BYTES):
        digest.update(chunk)
        progress.advance(len(chunk))
    return digest.hexdigest()


def _fill(url: str, target: IO[bytes], num_bytes: int, progress: Progress) -> None:
    """Append the missing bytes. Asks again after a broken connection."""
    from huggingface_hub import errors

    tries = _TRIES
    while (start := target.tell()) < num_bytes:
        try:
            _append(url, target, num_bytes, progress)
        except errors.HfHubHTTPError as error:
            if error.response.status_code < 500 or tries <= 1:
                raise
        except errors.HTTPError:  # type: ignore[attr-defined]  # of the library's HTTP client
            if tries <= 1:
                raise
        tries = _TRIES if target.tell() > start else tries - 1
        if target.tell() < num_bytes:
            if not tries:
                raise OSError(f"the connection ended {_TRIES} times without a new byte")
            time.sleep(_PAUSE_S)


def _append(url: str, target: IO[bytes], num_bytes: int, progress: Progress) -> None:
    """Append what one answer has, but not more than a chunk too much: the hash is then wrong."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, and re-exported without a list
        build_hf_headers,
        hf_raise_for_status,
    )

    start = target.tell()
    headers = build_hf_headers() | {"accept-encoding": "identity"} | ({"range": f"bytes={start}-"} if start else {})
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_QUIET_S) as answer:
        hf_raise_for_status(answer)
        if start and answer.status_code != 206:  # a server that sends the whole file
            progress.advance(-start)
            _empty(target)
        for chunk in answer.iter_bytes(_CHUNK_BYTES):
            target.write(chunk)
            progress.advance(len(chunk))
            if target.tell() > num_bytes:
                return


def _lock(part: IO[bytes], name: str, progress: Progress) -> None:
    """Hold the lock of a partial file until it is closed; a file system without locks has none."""
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress.message(f"Another process is fetching {name}; waiting for it.")
        fcntl.flock(part, fcntl.LOCK_EX)
        part.seek(0, 2)
    except OSError:
        pass
