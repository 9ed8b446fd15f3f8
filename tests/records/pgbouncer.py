"""A PgBouncer in transaction mode, in front of the PostgreSQL server of the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import make_url
from tests.missing import skip_missing
from tests.records.postgresql import free_port
from tests.waiting import LONG_S

__all__ = ["in_front_of"]

_CONFIG = """
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
"""


@contextlib.contextmanager
def in_front_of(url: str) -> Iterator[str]:
    """Yield the URL of the same database behind a PgBouncer. Skips the test without one."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        skip_missing("pgbouncer", "it gives each transaction to another connection")
    direct, own_port = make_url(url), free_port()
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as directory:
        config = Path(directory, "pgbouncer.ini")
        config.write_text(
            _CONFIG.format(host=direct.host, port=direct.port or 5432, user=direct.username, own_port=own_port)
        )
        if user is not None:
            shutil.chown(directory, user)
        with Path(directory, "log").open("wb") as log:
            process = subprocess.Popen([program, str(config)], user=user, stdout=log, stderr=log)
        try:
            _wait_for(own_port)
            yield direct.set(host="127.0.0.1", port=own_port).render_as_string(hide_password=False)
        finally:
            process.terminate()
            process.wait(timeout=LONG_S)


def _wait_for(port: int) -> None:
    deadline_s = time.monotonic() + LONG_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=LONG_S).close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
