"""A fair queue: owners take turns, and each owner's tickets are in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

__all__ = ["FairQueue"]


class _Owned(Protocol):
    owner: str


_T = TypeVar("_T", bound=_Owned)


class FairQueue(Generic[_T]):
    """However many tickets one owner has, another owner's first ticket waits for only one turn. Iteration starts with
    the ticket whose turn it is."""

    def __init__(self) -> None:
        self._by_owner: dict[str, deque[_T]] = {}  # in the order of their turns
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[_T]:
        for tickets in self._by_owner.values():
            yield from tickets

    def num_ahead(self, ticket: _T) -> int:
        """Return how many tickets have their turn before a queued one. Raises: KeyError, ValueError if it is not
        queued."""
        index = self._by_owner[ticket.owner].index(ticket)
        before, is_behind = 0, False
        for owner, tickets in self._by_owner.items():
            is_behind = is_behind or owner == ticket.owner
            before += index if owner == ticket.owner else min(len(tickets), index + (not is_behind))
        return before

    def append(self, ticket: _T) -> None:
        self._by_owner.setdefault(ticket.owner, deque()).append(ticket)
        self._size += 1

    def take(self, ticket: _T) -> None:
        """Remove a ticket that starts. Its owner's next turn comes after those of all other owners."""
        self.remove(ticket)
        if ticket.owner in self._by_owner:
            self._by_owner[ticket.owner] = self._by_owner.pop(ticket.owner)

    def remove(self, ticket: _T) -> None:
        """Remove a ticket. Raises: KeyError, ValueError if it is not in the queue."""
        tickets = self._by_owner[ticket.owner]
        tickets.remove(ticket)
        self._size -= 1
        if not tickets:
            del self._by_owner[ticket.owner]
