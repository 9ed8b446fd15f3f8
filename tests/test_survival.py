"""bench/survival.py: what its client does and counts, and that the pages show what it found."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.generated import check_table
from tests.waiting import LONG_S
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "survival.md"
WORDS = ["the", "river", "ran", "past", "a", "mill", "where", "an", "old", "dog", "slept"]
ANSWER = " ".join(WORDS)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import survival_client

    return survival_client


@pytest.fixture
def bench(client: ModuleType) -> ModuleType:
    import survival

    return survival


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each word."""
    words = [*WORDS, "cat", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def results() -> dict[str, Any]:
    (path,) = (ROOT / "bench").glob("*-survival-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("shown", "before", "expected"),
    [
        (ANSWER, [], (0, 0, 0, 0)),
        ("the river ran past", [], (7, 0, 0, 0)),
        ("the river ran ran past a mill where an old dog slept", [], (0, 1, 0, 0)),
        ("the river ran past a mill where an old cat slept", [], (0, 0, 1, 0)),
        ("the river where an old dog slept", [], (4, 0, 0, 0)),
        (ANSWER, ["the river ran"], (0, 0, 0, 3)),
    ],
)
def test_counts(
    client: ModuleType, tokenizer: Tokenizer, shown: str, before: list[str], expected: tuple[int, int, int, int]
) -> None:
    found = client.count(shown, before, ANSWER, tokenizer)
    assert (found.lost, found.doubled, found.changed, found.again) == expected


Answering = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(*answers: Answering) -> Iterator[str]:
    """A server that gives each request the next of these answers. Yields its address."""
    left = iter(answers)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            next(left)(self)
            self.close_connection = True

        do_GET = do_POST = answer  # noqa: N815  # the library's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the library's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


def openai(words: list[str], *, finish: str | None) -> Answering:
    """Answer with these words; without `finish` the connection breaks after them."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": f"{word} "}}]} for word in words]
        events += [{"choices": [{"delta": {}, "finish_reason": finish}]}] if finish else []
        body = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events)
        request.send_response(200)
        request.send_header("Content-Length", str(len(body) + (0 if finish else 1)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def refusal(status: int) -> Answering:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.end_headers()

    return answer


def read(client: ModuleType, url: str, *, conversation: str = "") -> Any:  # Any: bench is no package
    reader = client.Reader(client.OpenAIWire("m", {}, conversation=conversation), [url], mark=1)
    reader.start()
    reader.join(LONG_S)
    return reader


def test_an_answer_that_breaks_is_asked_for_again(client: ModuleType) -> None:
    with server(openai(WORDS[:3], finish=None), refusal(503), openai(WORDS, finish="stop")) as url:
        reader = read(client, url)
    assert (reader.text.split(), reader.is_complete) == (WORDS, True)
    assert [text.split() for text in reader.before] == [WORDS[:3]]
    assert reader.ways == ["asked", "asked again"]


def test_an_answer_that_a_server_keeps_is_continued(client: ModuleType) -> None:
    with server(openai(WORDS[:3], finish=None), openai(WORDS[3:], finish="stop")) as url:
        reader = read(client, url, conversation="one")
    assert (reader.text.split(), reader.before, reader.is_complete) == (WORDS, [], True)
    assert reader.ways == ["asked", "continued"]


def test_an_answer_that_a_server_has_lost_is_asked_for_again(client: ModuleType) -> None:
    with server(openai(WORDS[:3], finish=None), refusal(404), openai(WORDS, finish="stop")) as url:
        reader = read(client, url, conversation="one")
    assert reader.text.split() == WORDS
    assert reader.ways == ["asked", "asked again"]


def test_the_page_shows_what_was_measured(bench: ModuleType) -> None:
    found = results()
    for name, make in (("versions", bench.versions_table), ("rows", bench.table)):
        check_table(PAGE, f"test_survival.py ({name})", make(found) + "\n")
    check_table(ROOT / "README.md", "test_survival.py", bench.short_table(found) + "\n")


def test_each_row_was_measured_twice() -> None:
    turns: dict[tuple[str, str], list[int]] = {}
    for row in results()["rows"]:
        turns.setdefault((row["server"], row["fault"]), []).append(row["turn"])
    assert all(found == [1, 2] for found in turns.values())
