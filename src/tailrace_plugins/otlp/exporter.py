"""The process that exports traces: `python -m tailrace_plugins.otlp.exporter`, started by `exporter_process`.

It reads a span a line. When its input ends, it sends what is left and ends, also if the server was killed.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys

import msgspec

from tailrace_plugins.otlp.collector import Collector
from tailrace_plugins.otlp.spans import decode

__all__ = ["main"]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a signal to all processes must not end it before the server
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump might contain prompts
    os.nice(10)  # servers and engines go first: traces can wait for seconds
    logging.basicConfig(format="%(message).1000s")  # the server logs these lines
    collector = Collector(os.environ["TAILRACE_OTLP"], server_pid=os.getppid())
    for line in sys.stdin.buffer:
        try:
            collector.add(decode(line))
        except msgspec.DecodeError:  # the server was killed while it wrote the line
            logging.warning("A span was cut off.")
    collector.close()


if __name__ == "__main__":
    main()
