"""Adds quotas of keys and owners, and usage per day."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("keys", sa.Column("quota", sa.Text, nullable=False, server_default="{}"))
    op.add_column("requests", sa.Column("num_requests", sa.Integer, nullable=False, server_default="1"))
    op.create_table(
        "owners",
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("quota", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_owners"),
    )
    op.create_index("ix_owners_version", "owners", ["version"])
    op.create_table(
        "usage_days",
        sa.Column("day", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("wire", sa.String(40), nullable=False),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sa.Column("num_refused", sa.BigInteger, nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("total_s", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("day", "owner", "key_id", "model", "wire", name="pk_usage_days"),
    )


def downgrade() -> None:
    op.drop_table("usage_days")
    op.drop_table("owners")
    with op.batch_alter_table("requests") as table:
        table.drop_column("num_requests")
    with op.batch_alter_table("keys") as table:
        table.drop_column("quota")
