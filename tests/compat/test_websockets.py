from __future__ import annotations

import inspect

from tests.compat.checked import check_versions
from websockets.server import ServerProtocol


def test_versions() -> None:
    check_versions("websockets", "17", "17.4", tests="tests/http tests/transport")


def test_names() -> None:
    """The parser calls `reader.at_eof` before each frame."""
    core = ServerProtocol()
    assert inspect.isgeneratorfunction(core.reader.at_eof)
    assert "reader.at_eof()" in inspect.getsource(ServerProtocol.parse) + inspect.getsource(ServerProtocol.__mro__[1])
    for name in ("close_rcvd", "close_sent", "current_size", "debug", "parser_exc", "state"):
        assert hasattr(core, name), name
