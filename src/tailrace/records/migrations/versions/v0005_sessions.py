"""Sessions of browsers."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("token_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("expires_s", sa.Float(53), nullable=False),
        sa.Column("ended_s", sa.Float(53)),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["keys.key_id"], name="fk_sessions_keys", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("token_hash", name="pk_sessions"),
    )
    op.create_index("ix_sessions_key_id", "sessions", ["key_id"])
    op.create_index("ix_sessions_version", "sessions", ["version"])


def downgrade() -> None:
    op.drop_table("sessions")
