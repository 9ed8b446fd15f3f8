"""The laws of the `LogStore` promise, as code: `check_log_store(make)` passes, or says which law is broken and how.

For authors of homes of streams. With pytest, one test a law::

    import pytest
    from tailrace.testing import StoreLaw, store_laws

    @pytest.mark.parametrize("law", store_laws, ids=str)
    def test_store(law: StoreLaw) -> None:
        law(open_my_store)

or all of them in one: `check_log_store(open_my_store)`. `make` opens a store over a directory; a home that is not a
directory takes its path as a name. Called again with the same path, it is the next server over what the last one left.

A law also asks what a server would leave if it were killed now. `snapshot` copies the home to another path meanwhile: a
directory as it is on disk, if nothing else is given. Laws about the next server say nothing of a store that is not
durable.
"""

from __future__ import annotations

from tailrace.testing._store_laws import laws_of_one_server
from tailrace.testing._store_trial import MakeStore, Snapshot, StoreLaw, copy_directory
from tailrace.testing._take_over_laws import laws_of_the_next_server

__all__ = ["StoreLaw", "check_log_store", "store_laws"]

store_laws: tuple[StoreLaw, ...] = (*laws_of_one_server, *laws_of_the_next_server)


def check_log_store(make: MakeStore, *, snapshot: Snapshot = copy_directory) -> None:
    """Hold a log store to every law that applies to it. Runs an event loop of its own.

    Raises: AssertionError for the first law that is broken; whatever the store raises.
    """
    for law in store_laws:
        law(make, snapshot=snapshot)
