"""A connection of psycopg on which no exchange takes longer than allowed."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

__all__ = ["BoundedConnection", "NoAnswer"]

_Wanted = TypeVar("_Wanted")
_Ready = TypeVar("_Ready")
_Result = TypeVar("_Result")


class NoAnswer(psycopg.OperationalError):
    """The server has not answered in time."""


class BoundedConnection(psycopg.Connection[Any]):  # Any: the kind of its rows
    """A connection that is closed as soon as an exchange with the server takes longer than `answer_s`."""

    answer_s = 5.0

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:  # Any: as in psycopg, whose releases differ
        try:
            return super().wait(_bounded(gen, time.monotonic() + self.answer_s), *args, **kwargs)
        except NoAnswer:
            self.close()  # so that the pool drops it
            raise


def _bounded(exchange: Generator[_Wanted, _Ready, _Result], deadline_s: float) -> Generator[_Wanted, _Ready, _Result]:
    """Run an exchange of psycopg, which waits for the socket between two steps, and is woken several times a second.

    Raises: NoAnswer.
    """
    try:
        wanted = next(exchange)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline_s:
                raise NoAnswer("The server has not answered in time.")
            wanted = exchange.send(ready)
    except StopIteration as end:
        result: _Result = end.value
        return result
