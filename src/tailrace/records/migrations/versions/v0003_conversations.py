"""Conversations and their items."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "conversations",
        sa.Column("conversation_id", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("title", sa.String(200), nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.Column("updated_s", sa.Float(53), nullable=False),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("head", sa.String(64)),
        sa.Column("num_items", sa.Integer, nullable=False),
        sa.Column("num_characters", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("conversation_id", name="pk_conversations"),
    )
    op.create_index("ix_conversations_owner_updated_s", "conversations", ["owner", "updated_s"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", sa.String(64), nullable=False),
        sa.Column("item_id", sa.String(64), nullable=False),
        sa.Column("parent_id", sa.String(64)),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(24), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("call_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("status", sa.String(12), nullable=False),
        sa.Column("stream_id", sa.String(64), nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("conversation_id", "item_id", name="pk_conversation_items"),
        sa.ForeignKeyConstraint(
            ["conversation_id"],
            ["conversations.conversation_id"],
            name="fk_conversation_items_conversations",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_conversation_items_conversation_id_number", "conversation_items", ["conversation_id", "number"])
    op.create_index("ix_conversation_items_status", "conversation_items", ["status"])


def downgrade() -> None:
    op.drop_table("conversation_items")
    op.drop_table("conversations")
