"""Responses that are kept for longer than streams."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "kept_streams",
        sa.Column("stream_id", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.Column("stream", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("stream_id", name="pk_kept_streams"),
    )
    op.create_index("ix_kept_streams_created_s", "kept_streams", ["created_s"])


def downgrade() -> None:
    op.drop_table("kept_streams")
