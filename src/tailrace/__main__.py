"""The `tailrace` command, also as `python -m tailrace`."""

from __future__ import annotations

import atexit
import gc
import os
import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C ends the process without a traceback, also during imports."""
    stops = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background jobs ignore it
    if stops:
        signal.signal(signal.SIGINT, _exit_at_once)
    # Imports make no garbage, and logs hold millions of events without reference cycles: looking for garbage takes long
    # and frees little.
    gc.set_threshold(20_000, 50, 100)
    atexit.register(gc.freeze)  # neither at the end, where it takes as long as a quarter of the imports
    from tailrace.cli import main as run

    if stops:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _exit_at_once(*_: object) -> None:
    os._exit(130)


if __name__ == "__main__":
    main()
