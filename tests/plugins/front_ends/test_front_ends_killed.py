"""An answer of a front end outlives its page and its server: the page asks for the answer of its chat, and gets all of
it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.clients.installed import run_javascript_source
from tests.faults.house import House
from tests.http.wire import sse_data
from tests.waiting import until

from tailrace.dialects.bodies import JsonBody

__all__ = ["BODIES", "COUNT", "FOLLOW", "QUESTION", "SEED", "text_of"]

COUNT = 120
QUESTION = "Why do rivers bend?"
SEED = 7

BODIES: dict[str, JsonBody] = {
    "/v1/ai-sdk/chat": {
        "id": "chat/1",
        "messages": [{"id": "1", "role": "user", "parts": [{"type": "text", "text": QUESTION}]}],
        "maxOutputTokens": COUNT,
        "seed": SEED,
    },
    "/v1/ag-ui": {
        "threadId": "chat/1",
        "runId": "run-1",
        "messages": [{"id": "1", "role": "user", "content": QUESTION}],
        "tools": [],
        "context": [],
        "forwardedProps": {"max_tokens": COUNT, "seed": SEED},
    },
}
FOLLOW = {"/v1/ai-sdk/chat": "/v1/ai-sdk/chat/chat%2F1/stream", "/v1/ag-ui": "/v1/ag-ui/chat%2F1/events"}


_PAGE = Path(__file__).parents[3] / "docs" / "wires" / "front-ends.md"
_AGENT = """
const { url, before, begun, props } = JOB;
console.error = () => {};  // where the client writes what has failed
process.on("unhandledRejection", () => {});  // of the client, when it closes a connection that has broken off
const delay = (pause_ms) => new Promise((resolve) => setTimeout(resolve, pause_ms));
const runId = "run-1";
const plain = new HttpAgent({ url, threadId: "chat/1" });
const agent = new ResumingAgent({ url, threadId: "chat/1", initialMessages: before });
const subscriber = { onTextMessageContentEvent: () => writeFileSync(begun, "") };
const outcome = {};
await agent.runAgent({ runId, forwardedProps: props }, subscriber).catch((error) => { outcome.error = error.name; });
outcome.part = agent.messages.at(-1).content;
for (let num_tries = 0; num_tries < 500; num_tries++) {
  agent.setMessages(before);
  const { newMessages } = await agent.connectAgent({ runId }).catch(() => ({ newMessages: [] }));
  outcome.texts = newMessages.map((message) => message.content);
  if (outcome.texts.length) break;
  await delay(100);
}
outcome.of_plain = (await plain.connectAgent({ runId })).newMessages;
process.stdout.write(JSON.stringify(outcome));
"""


def text_of(body: bytes) -> str:
    events = [json.loads(one) for one in sse_data(body) if one != "[DONE]"]
    assert events[-1]["type"] in ("finish", "RUN_FINISHED"), events[-1]
    return "".join(one["delta"] for one in events if one["type"] in ("text-delta", "TEXT_MESSAGE_CONTENT"))


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_page_that_comes_back_after_the_server_was_killed(path: str, tmp_path: Path) -> None:
    answer = Answer(chat_ids(QUESTION), COUNT, SEED)
    with House(tmp_path, "scripted:tokens_per_s=60") as house:
        with house.server.http.stream("POST", path, json=BODIES[path]) as begun:
            assert begun.status_code == 200
            next(begun.iter_bytes())
        house.restart()
        again = house.server.http.get(FOLLOW[path])
        assert text_of(again.content) == answer.text
        assert house.server.http.get(FOLLOW[path]).status_code == 204


def test_an_answer_is_stopped_by_the_id_of_its_chat(tmp_path: Path) -> None:
    path = "/v1/ai-sdk/chat"
    with House(tmp_path, "scripted:tokens_per_s=20") as house:
        with house.server.http.stream("POST", path, json=BODIES[path]) as begun:
            chunks = begun.iter_bytes()
            next(chunks)
            assert house.server.http.delete(FOLLOW[path]).status_code == 200
            rest = b"".join(chunks)
        assert b'"type":"abort"' in rest
        assert house.server.http.delete(FOLLOW[path]).status_code == 404


@pytest.mark.deep
def test_an_agent_comes_back_with_the_code_on_the_page(tmp_path: Path) -> None:
    """AG-UI's `HttpAgent` gives up when its connection breaks off, and its `connectAgent` does nothing."""
    (code,) = re.findall(
        r"^```ts\n(import [^`]*class ResumingAgent .*?)^```", _PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    source, flags = "scripted:tokens_per_s=60", ("--data-dir", str(tmp_path / "data"))
    server = Server(source, *flags).wait_ready()
    job = {
        "url": f"{server.url}/v1/ag-ui",
        "before": BODIES["/v1/ag-ui"]["messages"],
        "begun": str(tmp_path / "begun"),
        "props": {"max_tokens": COUNT, "seed": SEED},
    }
    code = f'import {{ writeFileSync }} from "node:fs";\n{code}\n{_AGENT.replace("JOB", json.dumps(job))}'
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        thread = stack.enter_context(ThreadPoolExecutor(1))
        page = thread.submit(run_javascript_source, code)
        until(lambda: (tmp_path / "begun").exists() or page.done())
        server.send_signal(signal.SIGKILL)
        server.wait()
        again = Server(source, *flags, "--port", str(server.port)).wait_ready()
        stack.callback(again.close)
        outcome = json.loads(page.result())
    answer = Answer(chat_ids(QUESTION), COUNT, SEED).text
    assert outcome["error"]
    assert 0 < len(outcome["part"]) < len(answer)
    assert answer.startswith(outcome["part"])
    assert outcome["texts"] == [answer]
    assert outcome["of_plain"] == []
