"""Clients of other people, each as a function that sends a request and returns the text that the client shows.

The clients are in `language_clients`, `readers` and `other_processes`. A new client requests up to `MAX_TOKENS` tokens;
`test_failures` lists the exceptions that it raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import pytest

__all__ = [
    "DRIVERS",
    "MAX_TOKENS",
    "TIMEOUT_S",
    "ClientError",
    "Driver",
    "Outcome",
    "StreamFailed",
    "async_driver",
    "batch_driver",
    "driver",
    "params",
]

MAX_TOKENS = 256
TIMEOUT_S = 30.0
_THREADS = 32

C = TypeVar("C")  # a client, or no more than an address

Outcome = str | Exception  # a text, or what the client raised
_ReadAll = Callable[[str, Sequence[str]], list[Outcome]]


@dataclass(frozen=True, slots=True)
class Driver:
    name: str
    wire: str
    read_all: _ReadAll  # the server's address and prompts, all of them asked at once
    streams: bool  # heartbeats may come between
    resumes: bool  # it asks again, behind what it has, when its connection is cut
    deep: bool


class StreamFailed(Exception):
    """An event with an error. Our own readers raise it."""


class ClientError(Exception):
    """An error of a client in another process, with the name of its class."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


DRIVERS: dict[str, Driver] = {}


def params(drivers: Iterable[Driver]) -> list[object]:
    """Return parameters for `parametrize`, with ids. The first client in another process is installed during its test,
    so deep tests have more time."""
    deep = (pytest.mark.deep, pytest.mark.timeout(300))
    return [pytest.param(driver, id=driver.name, marks=deep if driver.deep else ()) for driver in drivers]


def batch_driver(
    name: str, wire: str, *, streams: bool = True, resumes: bool = False, deep: bool = False
) -> Callable[[_ReadAll], _ReadAll]:
    """Register a function that reads the answers to many prompts at once."""

    def register(read_all: _ReadAll) -> _ReadAll:
        assert name not in DRIVERS
        DRIVERS[name] = Driver(name, wire, read_all, streams, resumes, deep)
        return read_all

    return register


def driver(
    name: str,
    wire: str,
    client: Callable[[str], AbstractContextManager[C]],
    *,
    streams: bool = True,
    resumes: bool = False,
) -> Callable[[Callable[[C, str], str]], Callable[[C, str], str]]:
    """Register a function that reads the answer to one prompt. Its client is made from the server's address; many
    threads use the same client."""

    def register(read: Callable[[C, str], str]) -> Callable[[C, str], str]:
        def read_all(url: str, prompts: Sequence[str]) -> list[Outcome]:
            def outcome(prompt: str) -> Outcome:
                try:
                    return read(opened, prompt)
                except Exception as error:
                    return error

            with client(url) as opened, ThreadPoolExecutor(_THREADS) as pool:
                return list(pool.map(outcome, prompts))

        batch_driver(name, wire, streams=streams, resumes=resumes)(read_all)
        return read

    return register


def async_driver(
    name: str, wire: str, client: Callable[[str], AbstractAsyncContextManager[C]], *, streams: bool = True
) -> Callable[[Callable[[C, str], Awaitable[str]]], Callable[[C, str], Awaitable[str]]]:
    """Register a coroutine function, as `driver` does with a function."""

    def register(read: Callable[[C, str], Awaitable[str]]) -> Callable[[C, str], Awaitable[str]]:
        async def gather(url: str, prompts: Sequence[str]) -> list[Outcome]:
            async def outcome(prompt: str) -> Outcome:
                try:
                    return await read(opened, prompt)
                except Exception as error:
                    return error

            async with client(url) as opened:
                return list(await asyncio.gather(*map(outcome, prompts)))

        batch_driver(name, wire, streams=streams)(lambda url, prompts: asyncio.run(gather(url, prompts)))
        return read

    return register
