"""The laws of the `LogStore` protocol: `check_log_store(make)` passes, or reports the broken law.

For authors of log stores. With pytest, one test for each law::

    import pytest
    from tailrace.testing import StoreLaw, store_laws

    @pytest.mark.parametrize("law", store_laws, ids=str)
    def test_store(law: StoreLaw) -> None:
        law(open_my_store)

or all laws in one test: `check_log_store(open_my_store)`. `make` opens a store in a directory; a store without
directories uses the path as a name. Called again with the same path, it opens the next server over the same streams.

Some laws test what a killed server leaves. For them `snapshot` copies the storage of a running server to another path;
by default it copies the directory. Laws about the next server do not apply to stores that are not durable.
"""

from __future__ import annotations

from tailrace_outer.testing._store_harness import MakeStore, Snapshot, StoreLaw, copy_directory
from tailrace_outer.testing._store_laws import laws_of_one_server
from tailrace_outer.testing._take_over_laws import laws_of_the_next_server

__all__ = ["StoreLaw", "check_log_store", "store_laws"]

store_laws: tuple[StoreLaw, ...] = (*laws_of_one_server, *laws_of_the_next_server)


def check_log_store(make: MakeStore, *, snapshot: Snapshot = copy_directory) -> None:
    """Check every law that applies to a log store. Runs its own event loop.

    Raises: AssertionError for the first broken law; whatever the store raises.
    """
    for law in store_laws:
        law(make, snapshot=snapshot)
