"""Links that show one conversation or one stream."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "shares",
        sa.Column("share_id", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("target", sa.String(64), nullable=False),
        sa.Column("secret", sa.LargeBinary(32), nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.Column("expires_s", sa.Float(53), nullable=False),
        sa.Column("revoked_s", sa.Float(53)),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("share_id", name="pk_shares"),
    )
    op.create_index("ix_shares_owner", "shares", ["owner"])
    op.create_index("ix_shares_version", "shares", ["version"])


def downgrade() -> None:
    op.drop_table("shares")
