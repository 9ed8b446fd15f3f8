from __future__ import annotations

import inspect

from tests.compat.checked import check_versions, parameters
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import Server, ServerState

from tailrace.compat.uvicorn import STATUS_LINE, HttpConnection, RequestResponseCycle


def test_versions() -> None:
    check_versions("uvicorn", "0.50", "0.54", tests="tests/http tests/transport")


def test_names() -> None:
    """`transport/http_protocol.py` reads these attributes of a connection, of a request and of the server."""
    assert parameters(HttpToolsProtocol._start_asgi_task) == ["self", "cycle", "app"]
    for name in (
        "_should_upgrade", "_unset_keepalive_if_required", "handle_websocket_upgrade", "on_response_complete",
        "timeout_keep_alive_handler",
    ):  # fmt: skip
        assert parameters(getattr(HttpToolsProtocol, name)) == ["self"], name
    assert parameters(HttpConnection.__init__) == parameters(HttpToolsProtocol.__init__)
    assert {200, 503} <= STATUS_LINE.keys()
    of_connection = inspect.getsource(HttpToolsProtocol)
    for name in (
        "client", "cycle", "flow", "headers", "loop", "parser", "pipeline", "server_state", "timeout_keep_alive",
        "timeout_keep_alive_task", "transport", "url",
    ):  # fmt: skip
        assert f"self.{name}" in of_connection, name
    of_request = inspect.getsource(RequestResponseCycle)
    for name in ("disconnected", "message_event", "more_body", "response_complete", "response_started"):
        assert f"self.{name}" in of_request, name
    assert {"connections", "default_headers", "tasks"} <= vars(ServerState()).keys()
    assert inspect.isgeneratorfunction(inspect.unwrap(Server.capture_signals))
