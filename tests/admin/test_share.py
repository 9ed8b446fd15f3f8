"""`tailrace share` on a real server."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from click.testing import CliRunner, Result
from tests.api.process import Server

from tailrace_outer.admin.share import share


def run(server: Server, *arguments: str) -> Result:
    return CliRunner().invoke(share, [*arguments, "--url", server.url], env={"TAILRACE_KEY": ""})


def read(link: str) -> tuple[int, str]:
    root, _, token = link.partition("/share#")
    answer = httpx.get(f"{root}/v1/shared", headers={"x-tailrace-share": token}, trust_env=False)
    return answer.status_code, answer.text


def test_a_link_is_made_listed_and_revoked(server: Server) -> None:
    stream_id = server.create({"prompt": "Hi", "max_tokens": 3})
    server.wait_state(stream_id, "done")
    made = run(server, stream_id, "--expires", "1h")
    assert made.exit_code == 0, made.output
    link = made.output.strip()
    assert link.startswith(f"{server.url}/share#trs_")
    assert read(link)[0] == 200
    listed = run(server, "--list").output
    assert stream_id in listed
    assert link in listed
    assert run(server, "--revoke", link).exit_code == 0
    assert read(link)[0] == 404
    assert link not in run(server, "--list").output
    of_response = run(server, f"resp_{stream_id}").output.strip()
    assert read(of_response)[0] == 200
    assert run(server, "--revoke", of_response.partition("#trs_")[2].partition("_")[0]).exit_code == 0


@pytest.mark.parametrize(
    "arguments", [(), ("a", "--list"), ("no",), ("conv_no",), ("--revoke", "no"), ("a", "--expires", "soon")]
)
def test_what_cannot_be_shared_is_an_error_of_one_line(server: Server, arguments: tuple[str, ...]) -> None:
    ran = run(server, *arguments)
    assert ran.exit_code != 0
    assert "Traceback" not in ran.output
    assert ran.output.strip() or ran.exception


def test_a_response_with_mcp_tools_is_refused_with_what_to_share_instead(server: Server) -> None:
    ran = run(server, f"resp_mcp_{'0' * 32}")
    assert ran.exit_code == 1
    assert "share its conversation" in ran.output


class Hostile(BaseHTTPRequestHandler):
    """A server whose links are commands for a terminal."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [], "path": "/share#\x1b]0;x\x07"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - the name in the library


def test_a_link_of_a_server_is_no_command_for_the_terminal() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as hostile:
        threading.Thread(target=hostile.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hostile.server_port}"
        made = CliRunner().invoke(share, ["a", "--url", url], env={"TAILRACE_KEY": ""})
        hostile.shutdown()
    assert made.exit_code == 0, made.output
    assert "/share#" in made.output
    assert "\x1b" not in made.output
