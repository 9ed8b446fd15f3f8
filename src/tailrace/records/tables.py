"""The tables. A change here takes a migration in `migrations/versions`; a test holds the two against each other."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

__all__ = [
    "METADATA",
    "conversation_items",
    "conversations",
    "kept_streams",
    "key_changes",
    "keys",
    "owners",
    "requests",
    "sessions",
    "usage_days",
]

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

keys = Table(
    "keys",
    METADATA,
    Column("key_id", String(12), primary_key=True),
    Column("owner", String(200), nullable=False, index=True),
    Column("name", String(200), nullable=False),
    Column("scopes", Text, nullable=False),  # with spaces between
    Column("secret_hash", LargeBinary(32), nullable=False),
    Column("created_s", Float(53), nullable=False),  # all times: seconds since the epoch
    Column("expires_s", Float(53)),
    Column("revoked_s", Float(53)),
    Column("old_secret_hash", LargeBinary(32), nullable=False),
    Column("old_expires_s", Float(53)),
    Column("version", BigInteger, nullable=False, index=True),  # of the last change
    Column("quota", Text, nullable=False, server_default="{}"),  # JSON
)

# Those that have limits of their own.
owners = Table(
    "owners",
    METADATA,
    Column("owner", String(200), primary_key=True),
    Column("quota", Text, nullable=False),  # JSON
    Column("version", BigInteger, nullable=False, index=True),
)

# Of browsers that have signed in with a key.
sessions = Table(
    "sessions",
    METADATA,
    Column("token_hash", LargeBinary(32), primary_key=True),
    Column("key_id", String(12), ForeignKey("keys.key_id", ondelete="CASCADE"), nullable=False, index=True),
    Column("secret_hash", LargeBinary(32), nullable=False),  # of the key, when the session began
    Column("expires_s", Float(53), nullable=False),
    Column("ended_s", Float(53)),
    Column("version", BigInteger, nullable=False, index=True),  # of the last change
)

# One row, which each change of a key locks and raises. So versions come into sight in their order, and a server that
# asks for those above the last one that it saw misses none.
key_changes = Table(
    "key_changes",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
)

requests = Table(
    "requests",
    METADATA,
    Column("request_id", String(64), primary_key=True),  # the stream's id, where it came to one
    Column("created_s", Float(53), nullable=False),
    Column("owner", String(200), nullable=False),
    Column("key_id", String(12), nullable=False),  # "" where no keys are in use
    Column("model", String(200), nullable=False),
    Column("wire", String(40), nullable=False),
    Column("parameters", Text, nullable=False),  # JSON
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_completion_tokens", BigInteger, nullable=False),
    Column("num_choices", Integer, nullable=False),
    Column("queue_s", Float(53)),  # from the request to its place on the engine
    Column("first_token_s", Float(53)),  # from the request to the first token
    Column("total_s", Float(53), nullable=False),
    Column("status", String(20), nullable=False),  # records.rows.RequestRow says which
    Column("finish", String(40), nullable=False),  # stop, length …; the code of the error
    Column("num_requests", Integer, nullable=False, server_default="1"),  # that the row stands for
    Column("replays", Integer, nullable=False),  # how often an engine or server was lost under it
    Column("prompt", Text),  # with --record-text only
    Column("answer", Text),
    Index(None, "owner", "created_s"),
    Index(None, "key_id", "created_s"),
    Index(None, "created_s"),
)

# Sums of the rows of one day. They stay when rows are deleted for their age, and answer what was used without reading
# a million rows.
usage_days = Table(
    "usage_days",
    METADATA,
    Column("day", BigInteger, primary_key=True, autoincrement=False),  # its beginning in UTC, seconds since the epoch
    Column("owner", String(200), primary_key=True),
    Column("key_id", String(12), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("wire", String(40), primary_key=True),
    Column("num_requests", BigInteger, nullable=False),  # that were let in
    Column("num_refused", BigInteger, nullable=False),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_completion_tokens", BigInteger, nullable=False),
    Column("total_s", Float(53), nullable=False),
)

conversations = Table(
    "conversations",
    METADATA,
    Column("conversation_id", String(64), primary_key=True),
    Column("owner", String(200), nullable=False),
    Column("title", String(200), nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("updated_s", Float(53), nullable=False),
    Column("metadata", Text, nullable=False),  # JSON
    Column("head", String(64)),  # the item that the current branch ends in
    Column("num_items", Integer, nullable=False),
    Column("num_characters", BigInteger, nullable=False),  # of all items' texts
    Index(None, "owner", "updated_s"),
)

# Ids are a conversation's own, so that an imported one keeps those that it had.
conversation_items = Table(
    "conversation_items",
    METADATA,
    Column(
        "conversation_id",
        String(64),
        ForeignKey("conversations.conversation_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("item_id", String(64), primary_key=True),
    Column("parent_id", String(64)),
    Column("number", Integer, nullable=False),  # in order of coming
    Column("kind", String(24), nullable=False),
    Column("role", String(20), nullable=False),
    Column("text", Text, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("status", String(12), nullable=False),
    Column("stream_id", String(64), nullable=False),
    Column("created_s", Float(53), nullable=False),
    Index(None, "conversation_id", "number"),
    Index(None, "status"),
)

# Responses that are kept for longer than streams.
kept_streams = Table(
    "kept_streams",
    METADATA,
    Column("stream_id", String(64), primary_key=True),
    Column("owner", String(200), nullable=False),
    Column("created_s", Float(53), nullable=False, index=True),
    Column("stream", LargeBinary, nullable=False),  # record and events, msgpack
)
