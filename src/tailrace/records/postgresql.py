"""Connections to PostgreSQL on which nothing lasts for ever.

The server limits statements and waits for locks, as each transaction asks. But a server that is frozen keeps no limit,
while its kernel still acknowledges what it gets, so TCP reports no failure either. So the client has a limit, too.

PgBouncer may give each transaction to another connection of the server. So there are no prepared statements, and the
limits are set in each transaction, not for the connection.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL

from tailrace.compat.psycopg import BoundedConnection, NoReply

__all__ = ["is_late", "limit_transaction", "postgresql_engine"]

CONNECT_S = 5
_IDLE_S = 60.0  # of a transaction whose client is frozen: other servers wait for its locks
_MARGIN = 1.3  # the client's limit for a statement, as a multiple of the server's
_LATE = ("25P03", "55P03", "57014")  # idle in a transaction, a lock is not available, a statement was cancelled


def postgresql_engine(url: URL, *, reply_s: float) -> Engine:
    """`reply_s` is the time for an exchange outside of a transaction, such as the check of a pooled connection."""
    limits = {"connect_timeout": CONNECT_S, "tcp_user_timeout": 1000 * CONNECT_S}  # the latter in ms
    engine = create_engine(url, pool_pre_ping=True, connect_args={**limits, "prepare_threshold": None})

    # Any in both functions: typed as any driver's
    @event.listens_for(engine, "do_connect")
    def connect(_: object, record: object, given: Any, named: Any) -> Any:
        connection = BoundedConnection.connect(*given, **named)
        connection.reply_s = reply_s
        return connection

    @event.listens_for(engine, "checkin")
    def reset(connection: Any, record: object) -> None:
        if connection is not None:  # None: it was closed
            connection.reply_s = reply_s

    return engine


def limit_transaction(connection: Connection, statement_s: float) -> None:
    """Limit each statement of the current transaction; half of the time may pass with waiting for a lock."""
    bounded: Any = connection.connection.dbapi_connection  # Any: a BoundedConnection, typed as any driver's
    bounded.reply_s = statement_s * _MARGIN
    limits_s = {
        "statement_timeout": statement_s,
        "lock_timeout": statement_s / 2,
        "idle_in_transaction_session_timeout": _IDLE_S,
    }
    settings = ", ".join(f"set_config('{name}', '{1000 * limit_s:.0f}', true)" for name, limit_s in limits_s.items())
    connection.exec_driver_sql(f"SELECT {settings}")


def is_late(error: BaseException | None) -> bool:
    """Return whether an error of the driver says that something took too long."""
    return isinstance(error, NoReply) or getattr(error, "sqlstate", None) in _LATE
