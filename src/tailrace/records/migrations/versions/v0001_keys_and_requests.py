"""Adds the tables of keys and requests."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.Column("expires_s", sa.Float(53)),
        sa.Column("revoked_s", sa.Float(53)),
        sa.Column("old_secret_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("old_expires_s", sa.Float(53)),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_keys"),
    )
    op.create_index("ix_keys_owner", "keys", ["owner"])
    op.create_index("ix_keys_version", "keys", ["version"])
    changes = op.create_table(
        "key_changes",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_key_changes"),
    )
    op.bulk_insert(changes, [{"id": 1, "version": 0}])
    op.create_table(
        "requests",
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("wire", sa.String(40), nullable=False),
        sa.Column("parameters", sa.Text, nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_choices", sa.Integer, nullable=False),
        sa.Column("queue_s", sa.Float(53)),
        sa.Column("first_token_s", sa.Float(53)),
        sa.Column("total_s", sa.Float(53), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("finish", sa.String(40), nullable=False),
        sa.Column("replays", sa.Integer, nullable=False),
        sa.Column("prompt", sa.Text),
        sa.Column("answer", sa.Text),
        sa.PrimaryKeyConstraint("request_id", name="pk_requests"),
    )
    op.create_index("ix_requests_owner_created_s", "requests", ["owner", "created_s"])
    op.create_index("ix_requests_key_id_created_s", "requests", ["key_id", "created_s"])
    op.create_index("ix_requests_created_s", "requests", ["created_s"])


def downgrade() -> None:
    for table in ("requests", "key_changes", "keys"):
        op.drop_table(table)
