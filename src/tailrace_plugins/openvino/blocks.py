"""The blocks of the KV cache: which are free, which sequence has which, and which hold the beginning of a prompt.

A full block is known by the digest of all tokens up to its end, so equal beginnings share blocks. A block that no
sequence uses keeps its content until another sequence needs the room; the one that was used last goes last.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

__all__ = ["BLOCK_TOKENS", "Blocks", "digests"]

BLOCK_TOKENS = 32  # the library's block size on a CPU


def digests(
    token_ids: Sequence[int], root: bytes = b"", images: Sequence[tuple[int, int, str]] = ()
) -> Iterator[bytes]:
    """Yield the digest of each full block. `root` distinguishes what else changes the content, such as an adapter.
    `images` has the first token of each image, the one behind its last, and its own digest: all images have the same
    tokens."""
    content = np.array(token_ids, np.int64).tobytes()
    size = BLOCK_TOKENS * 8
    digest = root
    begun = {begin // BLOCK_TOKENS: b"" for begin, _, _ in images}
    for begin, end, name in images:
        begun[begin // BLOCK_TOKENS] += f" image {begin} {end} {name}".encode()
    for block, first in enumerate(range(0, len(content) - size + 1, size)):
        own = content[first : first + size] + begun.get(block, b"")
        digest = hashlib.blake2b(digest + own, digest_size=16).digest()
        yield digest


class Blocks:
    """Counts the sequences that use each block. A block of a sequence that is being computed has one user; a shared
    one has several; a cached one may have none."""

    def __init__(self, num_blocks: int) -> None:
        self._num_users = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached blocks without users, the next to go first

    def num_known(self, chain: Sequence[bytes]) -> int:
        """Return how many blocks at the beginning of a chain of digests are cached."""
        return next((index for index, digest in enumerate(chain) if digest not in self._by_digest), len(chain))

    def share(self, chain: Sequence[bytes]) -> list[int]:
        """Use cached blocks, all of which must be known."""
        shared = [self._by_digest[digest] for digest in chain]
        for block in shared:
            self._num_users[block] += 1
            self._unused.pop(block, None)
        return shared

    def take(self) -> int:
        """Return a block for one sequence. Raises: IndexError if there is none."""
        if self._free:
            block = self._free.pop()
        else:
            if not self._unused:
                raise IndexError("no KV block is left")
            block, _ = self._unused.popitem(last=False)
            del self._by_digest[self._digests.pop(block)]
        self._num_users[block] = 1
        return block

    def keep(self, block: int, digest: bytes) -> None:
        """Cache a full block. If another block has the same content, that one stays known."""
        if digest not in self._by_digest and block not in self._digests:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def release(self, table: Sequence[int]) -> None:
        """End the use of a sequence's blocks. Those at its end go first, since the beginning is shared more often."""
        for block in reversed(table):
            self._num_users[block] -= 1
            if self._num_users[block]:
                continue
            if block in self._digests:
                self._unused[block] = None
            else:
                self._free.append(block)
