"""What can be wrong with an app, and what its `infer` may see."""

from __future__ import annotations

from tailrace.errors import AppOutput, TailraceError

__all__ = ["AppError", "InferFailed", "OutputError", "StreamCancelled"]


class AppError(Exception):
    """The folder is not an app that can be served. The message names the file and says what is wrong with it."""


class StreamCancelled(BaseException):  # so that an app's `except Exception` around a send does not keep its loop going
    """Raised in the app by a send when nobody will read what is sent: let it through."""


class InferFailed(TailraceError):
    """The app's code raised something. What it was stands in the log; the client learns the message, and only that."""

    code = "app_failed"

    @property
    def told_to_clients(self) -> str:
        return self.message


class OutputError(InferFailed):
    """The app's code gave something that does not go over the wire; the message names the output."""

    code = AppOutput.code
