"""The errors of Inferless apps."""

from __future__ import annotations

from tailrace.errors import AppOutput, TailraceError
from tailrace.serve.folders import TargetError

__all__ = ["AppError", "InferFailed", "OutputError", "StreamCancelled"]


class AppError(TargetError):
    """The folder is not a servable app. The message names the file and the problem."""


class StreamCancelled(BaseException):  # not caught by an app's `except Exception` around a send
    """Raised by a send in the app when the stream has no reader any more. The app should not catch it."""


class InferFailed(TailraceError):
    """The app's code raised an exception. The log has the traceback; the client gets only the message."""

    code = "app_failed"

    @property
    def client_message(self) -> str:
        return self.message


class OutputError(InferFailed):
    """The app's output cannot be encoded. The message names the output."""

    code = AppOutput.code
