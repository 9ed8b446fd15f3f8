"""Reasoning on tailrace's own wires, over real sockets: resumed exactly, also after crashes."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.clients.json_socket import open_socket, receive_json, send_json
from tests.http.wire import as_json

SSE = {"accept": "text/event-stream"}
THINKS = 24
MARKERS = 8 + 11  # tokens, one for each byte
PROMPT = "Why do rivers bend?"
ANSWER = Answer(chat_ids(PROMPT), MARKERS + THINKS + 20, 7, THINKS)
ASKED = {"role": "user", "content": PROMPT}
BODY = {"messages": [ASKED], "max_tokens": ANSWER.count, "seed": ANSWER.seed}
NUM_REASONING = 8 + THINKS + 9  # the white space behind the second marker is none of it
SOURCE = f"scripted:thinks={THINKS}"
PACED = f"{SOURCE},tokens_per_s=100"


@pytest.fixture(scope="module")
def thinking() -> Iterator[Server]:
    with contextlib.closing(Server(SOURCE)) as running:
        yield running.wait_ready()


def events_of(body: bytes) -> list[tuple[str, dict[str, Any]]]:  # Any: of JSON
    """Return the name and the data of each event."""
    found = []
    for block in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:
            found.append((lines.get("event", "message"), json.loads(lines["data"])))
    return found


def joined(body: bytes) -> tuple[str, str]:
    """Return reasoning and text of a stream."""
    events = events_of(body)
    return tuple("".join(data["text"] for name, data in events if name == kind) for kind in ("reasoning", "message"))  # type: ignore[return-value]  # two of them


def whole_stream(server: Server, stream_id: str) -> bytes:
    return server.http.get(f"/v1/streams/{stream_id}/events").content


def test_reasoning_has_events_of_its_own(thinking: Server) -> None:
    stream_id = thinking.create(BODY)
    body = whole_stream(thinking, stream_id)
    assert joined(body) == ANSWER.split
    events = events_of(body)
    assert [token_id for _, data in events[:-1] for token_id in data["token_ids"]] == ANSWER.token_ids
    details = {"completion_tokens_details": {"reasoning_tokens": NUM_REASONING}}
    assert events[-1] == ("done", {"status": "done", "usage": ANSWER.usage | details})
    state = thinking.state(stream_id)
    assert (state["reasoning"], state["text"]) == ANSWER.split
    assert state["usage"] == ANSWER.usage | details


def test_a_stream_without_reasoning_has_none(server: Server) -> None:
    assert "reasoning" not in server.wait_state(server.create(BODY), "done")


def test_each_choice_has_reasoning(thinking: Server) -> None:
    state = thinking.wait_state(thinking.create(BODY | {"n": 2}), "done")
    answers = [Answer(ANSWER.prompt, ANSWER.count, ANSWER.seed + nth, THINKS).split for nth in (0, 1)]
    assert state["choices_reasoning"] == [reasoning for reasoning, _ in answers]
    assert state["choices"] == [text for _, text in answers]


def test_a_prompt_is_continued_as_the_model_writes(thinking: Server) -> None:
    state = thinking.wait_state(thinking.create({"prompt": "Rivers", "max_tokens": 40, "seed": 1}), "done")
    assert state["text"] == Answer("Rivers", 40, 1, THINKS).text
    assert "reasoning" not in state


def test_over_a_socket_its_frames_have_a_type(thinking: Server) -> None:
    with open_socket(thinking) as socket:
        send_json(socket, type="create", id="a", **BODY)
        frames = [receive_json(socket)]
        while frames[-1]["type"] in ("created", "delta", "reasoning"):
            frames.append(receive_json(socket))
    texts = {kind: "".join(f["text"] for f in frames if f["type"] == kind) for kind in ("reasoning", "delta")}
    assert (texts["reasoning"], texts["delta"]) == ANSWER.split
    assert [frame["seq"] for frame in frames[1:]] == list(range(1, len(frames)))


def test_in_durable_streams_it_has_its_own_name(thinking: Server) -> None:
    stream_id = thinking.create(BODY)
    thinking.wait_state(stream_id, "done")
    messages = thinking.http.get(f"/v1/durable/streams/{stream_id}").json()
    assert "".join(one.get("reasoning", "") for one in messages) == ANSWER.split[0]
    assert "".join(one.get("text", "") for one in messages) == ANSWER.split[1]


def test_a_setting_leaves_it_in_the_text(serve: Callable[..., Server]) -> None:
    server = serve(SOURCE, "--reasoning", "text")
    state = server.wait_state(server.create(BODY), "done")
    assert state["text"] == ANSWER.text
    assert "reasoning" not in state


def test_wires_without_reasoning_show_it_as_text(thinking: Server) -> None:
    asked = {"max_tokens": ANSWER.count}
    bare = thinking.http.post("/", params={"prompt": PROMPT, **asked}).text
    article = thinking.http.get("/query-stream/", params={"query": PROMPT, **asked}).text
    cumulative = thinking.post("/generate-stream", {"prompt": PROMPT, **asked})
    triton = thinking.post("/v2/models/scripted/generate", {"text_input": PROMPT, **asked}).json()["text_output"]
    tgi = thinking.post("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": ANSWER.count}}).json()
    for text in (bare, article, events_of(cumulative.content[: -len(b"data: [DONE]\n\n")])[-1][1]["text"], triton):
        assert text.startswith("<think>\n")
        assert "\n</think>\n\n" in text
    assert tgi["generated_text"].startswith("<think>\n")


def test_the_chatbot_shows_it_as_text(thinking: Server) -> None:
    with open_socket(thinking, "/") as socket:
        for prompt in (PROMPT, "Go on."):  # the second time with the first answer before it
            socket.send(prompt)
            frames = [str(socket.recv())]
            while frames[-1] != "<<Response Finished>>":
                frames.append(str(socket.recv()))
            assert "".join(frames).startswith("<think>\n")


# Conversations


def _items(server: Server, its_id: str) -> list[dict[str, Any]]:  # Any: of JSON
    return list(server.http.get(f"/v1/conversations/{its_id}/items", params={"order": "asc"}).json()["data"])


def test_an_answer_is_kept_with_its_reasoning(thinking: Server) -> None:
    conversation_id = thinking.post("/v1/conversations", {}).json()["id"]
    thinking.post("/v1/chat/completions", {**BODY, "conversation": conversation_id})
    question, answer = _items(thinking, conversation_id)
    assert "reasoning" not in question
    assert (answer["reasoning"], answer["content"][0]["text"]) == ANSWER.split
    # The next turn shows it to a template that asks for it.
    question_again = {"role": "user", "content": "Go on."}
    completion = thinking.post(
        "/v1/chat/completions", {**BODY, "messages": [question_again], "conversation": conversation_id}
    ).json()
    first_answer = f"<think>\n{ANSWER.split[0]}\n</think>\n\n{ANSWER.split[1]}\n".encode()
    user, assistant = chat_ids("")[0], chat_ids("")[-1]
    prompt = (*chat_ids(PROMPT), *first_answer, user, *b"Go on.\n", assistant)
    message = completion["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == Answer(prompt, ANSWER.count, 7, THINKS).split
    exported = thinking.http.get(f"/v1/conversations/{conversation_id}/export").json()
    made = thinking.post("/v1/conversations/import", exported).json()["data"][0]["id"]
    assert [one.get("reasoning") for one in _items(thinking, made)] == [
        one.get("reasoning") for one in _items(thinking, conversation_id)
    ]


def test_an_answer_that_ended_in_its_reasoning_continues_there(thinking: Server) -> None:
    its_id = thinking.post("/v1/conversations", {}).json()["id"]
    asked = {**BODY, "conversation": its_id, "max_tokens": 8 + 5}
    thinking.post("/v1/chat/completions", asked)
    _, cut = _items(thinking, its_id)
    assert cut["content"][0]["text"] == ""
    assert cut["status"] == "incomplete"
    thought = cut["reasoning"]
    thinking.post("/v1/chat/completions", {**asked, "messages": [], "max_tokens": ANSWER.count})
    _, answer = _items(thinking, its_id)
    written = Answer((*chat_ids(PROMPT), *f"<think>\n{thought}".encode()), ANSWER.count, 7, THINKS).text
    more, _, text = written.partition("\n</think>\n\n")
    assert (answer["reasoning"], answer["content"][0]["text"]) == (thought + more, text.lstrip())


# Somebody dies

# In the first marker, in the reasoning, in the second marker, in the text.
_FIRST, _REASONING, _SECOND, _TEXT = 4, 8 + 6, 8 + THINKS + 4, MARKERS + THINKS + 6


def _deep(*positions: int) -> list[Any]:  # Any: pytest's type of a parameter is private
    return [pytest.param(position, marks=pytest.mark.deep) for position in positions]


def _read(server: Server, num_events: int) -> tuple[str, bytes]:
    """Return the first events of a new stream, and its id."""
    with server.wire() as wire:
        wire.send("POST", "/v1/streams", BODY | {"linger_s": 600}, SSE)
        assert wire.head() == 200
        return wire.headers["x-stream-id"], b"".join(wire.event() for _ in range(num_events))


def _rest(server: Server, stream_id: str, seen: int) -> bytes:
    with server.wire() as wire:
        wire.send("GET", f"/v1/streams/{stream_id}/events", headers={"last-event-id": f"{stream_id}-{seen}"})
        assert wire.head() == 200
        return wire.body()


def check(server: Server, stream_id: str, first: bytes, seen: int) -> None:
    """Check that the parts before and after a crash are the whole stream of the oracle."""
    body = first + _rest(server, stream_id, seen)
    assert body == whole_stream(server, stream_id)
    assert joined(body) == ANSWER.split
    end = events_of(body)[-1][1]
    assert end["continuity"] == "replayed"
    assert end["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_REASONING}


@pytest.mark.parametrize("seen", [_FIRST, _REASONING, *_deep(_SECOND, _TEXT)])
def test_the_engine_is_killed(seen: int, serve: Callable[..., Server]) -> None:
    server = serve(PACED)
    stream_id, first = _read(server, seen)
    server.worker().kill()
    check(server, stream_id, first, seen)


@pytest.mark.parametrize("seen", [_SECOND, *_deep(_FIRST, _REASONING, _TEXT)])
def test_the_server_is_killed(seen: int, tmp_path: Path) -> None:
    with contextlib.closing(Server(PACED, "--data-dir", str(tmp_path))) as server:
        stream_id, first = _read(server.wait_ready(), seen)
        server.send_signal(signal.SIGKILL)
        server.wait()
    # What was begun is finished as it was begun, whatever the next server would do.
    with contextlib.closing(Server(PACED, "--data-dir", str(tmp_path), "--reasoning", "text")) as server:
        check(server.wait_ready(), stream_id, first, seen)


# Bad input


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"reasoning_format": "deepseek-legacy"}, "reasoning_format"),
        ({"reasoning_effort": "very"}, "reasoning_effort"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"messages": [ASKED, {"role": "assistant", "reasoning_content": "a\0b"}]}, "messages"),
        ({"messages": [ASKED, {"role": "assistant", "reasoning_content": 7}]}, "messages[1].reasoning_content"),
    ],
)
def test_invalid_requests_are_refused(more: dict[str, Any], param: str, thinking: Server) -> None:
    answer = thinking.post("/v1/chat/completions", BODY | more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_field_without_effect_is_named(thinking: Server, server: Server) -> None:
    messages = [ASKED, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}, ASKED]
    asked = {"messages": messages, "max_tokens": 3, "reasoning_effort": "low"}
    ignored = server.post("/v1/chat/completions", asked).headers["x-tailrace-ignored"]
    assert ignored == "reasoning_effort, messages[].reasoning_content"
    # This template asks for earlier reasoning, and does not know of effort.
    assert thinking.post("/v1/chat/completions", asked).headers["x-tailrace-ignored"] == "reasoning_effort"
    off = thinking.post("/v1/chat/completions", BODY | {"reasoning_effort": "none"})
    assert "x-tailrace-ignored" not in off.headers
    assert "reasoning_content" not in off.json()["choices"][0]["message"]


def test_data_of_events_is_read(thinking: Server) -> None:
    """The lines of an event are in the order that every client reads."""
    body = whole_stream(thinking, thinking.create(BODY))
    first = next(block for block in body.split(b"\n\n") if b"event: reasoning" in block)
    assert [line.partition(b":")[0] for line in first.splitlines()] == [b"event", b"data", b"id"]
    assert as_json(first.splitlines()[1].removeprefix(b"data: "))["token_ids"]
