from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from starlette.concurrency import iterate_in_threadpool
from tests.compat.checked import check_versions

from tailrace_outer.serve.starlette_names import plain_generator


def test_versions() -> None:
    check_versions("starlette", "0.52", "1.10", tests="tests/http tests/transport tests/api tests/serve tests/apps")


async def test_the_plain_generator_in_a_thread_is_found() -> None:
    def plain() -> Iterator[int]:
        yield 1
        yield 2

    generator = plain()
    iterated = iterate_in_threadpool(generator)
    assert await anext(iterated) == 1
    assert plain_generator(iterated) is generator  # type: ignore[arg-type]  # an async generator, typed as iterator
    assert [item async for item in iterated] == [2]
    assert plain_generator(iterated) is None  # type: ignore[arg-type]  # as above


async def test_other_generators_have_none() -> None:
    async def other() -> AsyncIterator[int]:
        yield 1

    iterated = other()
    assert [item async for item in iterated] == [1]
    assert plain_generator(iterated) is None  # type: ignore[arg-type]  # an async generator, typed as iterator
