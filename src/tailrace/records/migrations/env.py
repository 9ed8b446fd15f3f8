"""Run by Alembic, over the connection that `Database.migrate` has opened."""

from alembic import context

from tailrace.records.database_tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
    transaction_per_migration=False,
)
context.run_migrations()
