"""Whatever clients can do to durable streams, and what can be compared afterwards."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from tailrace.errors import RequestError, StreamError
from tailrace_plugins.durable_streams.durable_changes import Created, Stamp
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.operations import Creation, ProducerBatch

__all__ = ["outcome", "state", "steps", "take", "unnamed"]

KEYS = (b"a", b"b", b"c", b"d")


def state(store: DurableStore) -> dict[bytes, tuple[object, ...]]:
    """Return everything that a client could see, and the charged size."""
    return {
        key: (
            stream.created, list(stream.chunks), dict(stream.producers), stream.last_seq, stream.is_closed,
            stream.closed_by, stream.is_gone, stream.num_forks, stream.num_bytes,
        )
        for key, stream in store.streams.items()
    }  # fmt: skip


# Whatever is done

creations = st.builds(
    Creation,
    content_type=st.sampled_from([None, "text/plain", "application/json", "Application/JSON; charset=utf-8"]),
    closes=st.booleans(),
    source=st.sampled_from([None, *KEYS]),
    fork_part=st.integers(0, 3),
)
batches = st.builds(
    ProducerBatch,
    body=st.sampled_from([b"", b"x", b"[1,2]", b"[]", b'{"a": [3]}', b"hello"]),
    content_type=st.sampled_from([None, "text/plain", "application/json"]),
    closes=st.booleans(),
    stamp=st.none() | st.builds(Stamp, st.sampled_from(["p", "q"]), st.integers(0, 2), st.integers(0, 3)),
    seq=st.none() | st.sampled_from(["1", "2", "3"]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.sampled_from(KEYS), creations, st.sampled_from([b"", b"[1,2]", b"first"])),
        st.tuples(st.just("fork"), st.sampled_from(KEYS), creations, st.integers(0, 5)),
        st.tuples(st.just("append"), st.sampled_from(KEYS), batches),
        st.tuples(st.just("delete"), st.sampled_from(KEYS)),
    ),
    max_size=40,
)


def take(store: DurableStore, step: tuple[object, ...]) -> object:
    """Return what can be compared."""
    match step:
        case ("create", bytes(key), Creation() as asked, bytes(body)):
            return store.create(key, asked, body)[0].end
        case ("fork", bytes(key), Creation() as asked, int(position)):
            offset = "0" * 16 + "_" + "0" * 16
            if asked.source is not None:
                source = store.find(asked.source)
                offset = source.offset(min(position, source.tail))
            fork = Creation(source=asked.source, fork_offset=offset, fork_part=asked.fork_part)
            return store.create(key, fork, b"")[0].end
        case ("append", bytes(key), ProducerBatch() as batch):
            return store.append(key, batch)
        case ("delete", bytes(key)):
            store.delete(key)
            return None
        case _:
            raise AssertionError(step)


def outcome(store: DurableStore, step: tuple[object, ...]) -> object:
    try:
        return take(store, step)
    except (StreamError, RequestError) as error:
        return repr(error)


def unnamed(item: tuple[bytes, tuple[object, ...]]) -> tuple[object, ...]:
    """Return the state of a stream without what is random."""
    key, (created, *rest) = item
    assert isinstance(created, Created)
    return key, msgspec.structs.replace(created, incarnation=""), *rest
