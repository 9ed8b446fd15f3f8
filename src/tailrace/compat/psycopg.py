"""A connection of psycopg on which no exchange takes longer than allowed."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

__all__ = ["BoundedConnection", "NoReply"]

_Wanted = TypeVar("_Wanted")
_Ready = TypeVar("_Ready")
_Result = TypeVar("_Result")


class NoReply(psycopg.OperationalError):
    """The server has not replied in time."""


class BoundedConnection(psycopg.Connection[Any]):  # Any: the kind of its rows
    """A connection that is closed as soon as an exchange with the server takes longer than `reply_s`."""

    reply_s = 5.0

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:  # Any: as in psycopg, whose releases differ
        try:
            return super().wait(_bounded(gen, time.monotonic() + self.reply_s), *args, **kwargs)
        except NoReply:
            self.close()  # so that the pool drops it
            raise


def _bounded(exchange: Generator[_Wanted, _Ready, _Result], deadline_s: float) -> Generator[_Wanted, _Ready, _Result]:
    """Run an exchange of psycopg, which waits for the socket between two steps, and is woken several times a second.

    Raises: NoReply.
    """
    try:
        wanted = next(exchange)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline_s:
                raise NoReply("The server has not replied in time.")
            wanted = exchange.send(ready)
    except StopIteration as end:
        result: _Result = end.value
        return result
