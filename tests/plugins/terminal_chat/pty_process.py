"""A `tailrace` command at its own pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator

from tests.api.process import TAILRACE, environment
from tests.waiting import until

__all__ = ["Terminal", "terminal"]

# The controlling terminal is that from which Ctrl-C comes.
_AT_TERMINAL = "import os, sys; os.login_tty(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>78]")


class Terminal:
    """A terminal with 80 columns and 24 lines. `raw` is the command's whole output, `text` the same without escape
    sequences."""

    def __init__(self, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        # This terminal answers no questions about its cursor.
        of_terminal = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _AT_TERMINAL, str(slave), TAILRACE, *arguments], pass_fds=[slave],
            env=environment() | of_terminal | variables,
        )  # fmt: skip
        os.close(slave)
        self._bytes = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # which Linux has for the end
            while piece := os.read(self._master, 65536):
                self._bytes += piece

    @property
    def raw(self) -> str:
        return self._bytes.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self.raw)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str, *, count: int = 1) -> None:
        """Wait until the text was written this many times."""
        try:
            until(lambda: self.text.count(text) >= count or self.process.poll() is not None)
        except AssertionError:
            raise AssertionError(f"no {text!r} in:\n{self.text}") from None
        self_text = self.text if self.process.poll() is None else self._rest()
        assert self_text.count(text) >= count, f"no {text!r} in:\n{self_text}"

    def wait(self) -> int:
        """Return the exit status when the whole output is read."""
        status = self.process.wait(45)
        self._rest()
        return status

    def _rest(self) -> str:
        self._reader.join(10)
        return self.text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        self._reader.join(10)
        os.close(self._master)


@contextlib.contextmanager
def terminal(*arguments: str, **variables: str) -> Iterator[Terminal]:
    running = Terminal(arguments, variables)
    try:
        yield running
    finally:
        running.close()
