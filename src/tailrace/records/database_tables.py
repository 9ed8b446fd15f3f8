"""The tables. Each change here needs a migration in `migrations/versions`; a test compares the two."""

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
    "image_uses",
    "images",
    "kept_streams",
    "key_changes",
    "keys",
    "owners",
    "requests",
    "sessions",
    "shares",
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
    Column("scopes", Text, nullable=False),  # separated by spaces
    Column("secret_hash", LargeBinary(32), nullable=False),
    Column("created_s", Float(53), nullable=False),  # all times: seconds since the epoch
    Column("expires_s", Float(53)),
    Column("revoked_s", Float(53)),
    Column("old_secret_hash", LargeBinary(32), nullable=False),
    Column("old_expires_s", Float(53)),
    Column("version", BigInteger, nullable=False, index=True),  # of the last change
    Column("quota", Text, nullable=False, server_default="{}"),  # JSON
)

# Owners that have limits.
owners = Table(
    "owners",
    METADATA,
    Column("owner", String(200), primary_key=True),
    Column("quota", Text, nullable=False),  # JSON
    Column("version", BigInteger, nullable=False, index=True),
)

# Sessions of browsers that have signed in with a key.
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

# Links that show one conversation or one stream to whoever has them.
shares = Table(
    "shares",
    METADATA,
    Column("share_id", String(16), primary_key=True),
    Column("owner", String(200), nullable=False, index=True),
    Column("key_id", String(12), nullable=False),  # that made it; "" if no keys were in use
    Column("kind", String(16), nullable=False),  # conversation or stream
    Column("target", String(64), nullable=False),  # its id
    Column("secret", LargeBinary(32), nullable=False),  # signs the link
    Column("created_s", Float(53), nullable=False),
    Column("expires_s", Float(53), nullable=False),
    Column("revoked_s", Float(53)),
    Column("version", BigInteger, nullable=False, index=True),  # of the last change
)

# One row. Each change of a key locks it and increments the version. So versions become visible in order, and a server
# that reads the versions after its last one misses none.
key_changes = Table(
    "key_changes",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
)

requests = Table(
    "requests",
    METADATA,
    Column("request_id", String(64), primary_key=True),  # the stream's id, if a stream was started
    Column("created_s", Float(53), nullable=False),
    Column("owner", String(200), nullable=False),
    Column("key_id", String(12), nullable=False),  # "" if no keys are in use
    Column("model", String(200), nullable=False),
    Column("wire", String(40), nullable=False),
    Column("parameters", Text, nullable=False),  # JSON
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_completion_tokens", BigInteger, nullable=False),
    Column("num_choices", Integer, nullable=False),
    Column("queue_s", Float(53)),  # from the request to its start on the engine
    Column("first_token_s", Float(53)),  # from the request to the first token
    Column("total_s", Float(53), nullable=False),
    Column("status", String(20), nullable=False),  # see records.rows.RequestRow
    Column("finish", String(40), nullable=False),  # stop, length, …; or the error code
    Column("num_requests", Integer, nullable=False, server_default="1"),  # how many requests the row represents
    Column("replays", Integer, nullable=False),  # how often an engine or server died while it ran
    Column("prompt", Text),  # only with --record-text
    Column("answer", Text),
    Index(None, "owner", "created_s"),
    Index(None, "key_id", "created_s"),
    Index(None, "created_s"),
)

# Sums of the rows per day. They stay when old rows are deleted, and make usage queries fast.
usage_days = Table(
    "usage_days",
    METADATA,
    Column(
        "day", BigInteger, primary_key=True, autoincrement=False
    ),  # start of the day in UTC, seconds since the epoch
    Column("owner", String(200), primary_key=True),
    Column("key_id", String(12), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("wire", String(40), primary_key=True),
    Column("num_requests", BigInteger, nullable=False),  # that were accepted
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
    Column("head", String(64)),  # last item of the current branch
    Column("num_items", Integer, nullable=False),
    Column("num_characters", BigInteger, nullable=False),  # of the texts of all items
    Index(None, "owner", "updated_s"),
)

# Item ids are unique only within a conversation, so imported conversations keep theirs.
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
    Column("number", Integer, nullable=False),  # order of creation
    Column("kind", String(24), nullable=False),
    Column("role", String(20), nullable=False),
    Column("text", Text, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("status", String(12), nullable=False),
    Column("stream_id", String(64), nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("reasoning", Text, nullable=False, server_default=""),  # what was thought before it
    Column("images", Text, nullable=False, server_default="[]"),  # JSON: their positions in the text, and their digests
    Index(None, "conversation_id", "number"),
    Index(None, "status"),
)

# Each image of an owner once, and who has it: a conversation, or a stored response. One that nobody has is deleted.
images = Table(
    "images",
    METADATA,
    Column("owner", String(200), primary_key=True),
    Column("digest", String(64), primary_key=True),
    Column("media_type", String(40), nullable=False),
    Column("num_bytes", Integer, nullable=False),
    Column("content", LargeBinary, nullable=False),  # last: SQLite reads the others without it
)

image_uses = Table(
    "image_uses",
    METADATA,
    Column("owner", String(200), primary_key=True),
    Column("holder", String(64), primary_key=True),  # the id of the conversation or of the response
    Column("digest", String(64), primary_key=True),
    Column("created_s", Float(53), nullable=False),
    Index(None, "owner", "digest"),
    Index(None, "created_s"),
)

# Stored responses, which are kept longer than streams.
kept_streams = Table(
    "kept_streams",
    METADATA,
    Column("stream_id", String(64), primary_key=True),
    Column("owner", String(200), nullable=False),
    Column("created_s", Float(53), nullable=False, index=True),
    Column("stream", LargeBinary, nullable=False),  # record and events, msgpack
)
