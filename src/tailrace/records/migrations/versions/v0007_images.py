"""Images of conversations and of stored responses."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "images",
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("media_type", sa.String(40), nullable=False),
        sa.Column("num_bytes", sa.Integer, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("owner", "digest", name="pk_images"),
    )
    op.create_table(
        "image_uses",
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("owner", "holder", "digest", name="pk_image_uses"),
    )
    op.create_index("ix_image_uses_owner_digest", "image_uses", ["owner", "digest"])
    op.create_index("ix_image_uses_created_s", "image_uses", ["created_s"])
    op.add_column("conversation_items", sa.Column("images", sa.Text, nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("conversation_items", "images")
    op.drop_table("image_uses")
    op.drop_table("images")
