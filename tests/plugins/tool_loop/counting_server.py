"""An MCP server over stdio whose calls are counted: each one is a line of a file, written before the answer.

It needs no package, so it starts at once. `python counting_server.py FILE [TOOLS]`: TOOLS is a file with other tools.
A tool's arguments may say what happens: `kill` ends the parent, the server that calls, before or after the call is
counted, but only at the first such call; `error` is the code of an error; `exit` ends this program; `sleep_s` waits;
`bytes` is the answer's length.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]  # Any: JSON

_SCHEMA: Json = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS: list[Json] = [
    {"name": "append", "description": "Adds a line.", "inputSchema": _SCHEMA},
    {
        "name": "look",
        "description": "Looks at the lines.",
        "inputSchema": _SCHEMA,
        "annotations": {"readOnlyHint": True},
    },
    {
        "name": "put",
        "description": "Sets a line.",
        "inputSchema": _SCHEMA,
        "annotations": {"readOnlyHint": False, "idempotentHint": True},
    },
]


def main() -> None:
    counts = Path(sys.argv[1])
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        answer: Json = {"jsonrpc": "2.0", "id": message["id"]}
        match message["method"]:
            case "initialize":
                answer["result"] = {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "counting", "version": "1"},
                }
            case "tools/list":
                own = json.loads(Path(sys.argv[2]).read_text()) if len(sys.argv) > 2 else TOOLS
                answer["result"] = {"tools": own}
            case "tools/call":
                given = message["params"].get("arguments") or {}
                if "error" in given:
                    answer["error"] = {"code": given["error"], "message": "No."}
                else:
                    answer["result"] = _called(counts, message["params"])
            case _:
                answer["error"] = {"code": -32601, "message": "There is no such method."}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _called(counts: Path, params: Json) -> Json:
    given = params.get("arguments") or {}
    is_first = not counts.with_suffix(".killed").exists()
    if given.get("kill"):
        counts.with_suffix(".killed").touch()
    if given.get("kill") == "before" and is_first:
        os.kill(os.getppid(), signal.SIGKILL)
        _end_with_parent()
    with counts.open("a") as file:
        file.write(json.dumps([params["name"], given]) + "\n")
    if given.get("kill") == "after" and is_first:
        os.kill(os.getppid(), signal.SIGKILL)
        _end_with_parent()
    if given.get("exit"):
        os._exit(1)
    time.sleep(given.get("sleep_s", 0))
    if "until" in given:
        _wait_for(Path(given["until"]))
    if given.get("env"):
        return {"content": [{"type": "text", "text": json.dumps(dict(os.environ))}]}
    text = given.get("text", "done") + "x" * given.get("bytes", 0)
    return {"content": [{"type": "text", "text": text}], "isError": bool(given.get("fails"))}


def _wait_for(path: Path) -> None:
    """Wait until a file is there, and remove it."""
    parent = os.getppid()
    while not path.exists() and os.getppid() == parent:
        time.sleep(0.02)
    path.unlink(missing_ok=True)


def _end_with_parent() -> None:
    sys.stdin.read()  # until the pipe of the parent is closed
    os._exit(1)


if __name__ == "__main__":
    main()
