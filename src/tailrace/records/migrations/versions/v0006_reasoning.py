"""Adds the column `reasoning` to conversation items."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("conversation_items", sa.Column("reasoning", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("conversation_items", "reasoning")
