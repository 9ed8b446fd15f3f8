"""The log store in Redis keeps the laws of log stores, and what only a store of many servers has to keep."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from tests.testing.redis_server import copy_keys, prefix_of, shared_url

from tailrace.streams import LogStore
from tailrace.testing import StoreLaw, store_laws
from tailrace_outer.redis.redis_store import open_redis

LEASE_S = 2.0


@asynccontextmanager
async def in_redis(path: Path) -> AsyncIterator[LogStore]:
    async with open_redis(f"{shared_url()}?prefix={prefix_of(path)}", lease_s=LEASE_S) as store:
        yield store


def snapshot(source: Path, target: Path) -> None:
    with redis.Redis.from_url(shared_url()) as client:
        copy_keys(prefix_of(source), prefix_of(target), client)


@pytest.mark.parametrize("law", store_laws, ids=str)
def test_the_store_in_redis_keeps(law: StoreLaw) -> None:
    shared_url()
    law(in_redis, snapshot=snapshot)
