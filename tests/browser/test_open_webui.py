"""Open WebUI, its server and its page, with the default model and one that embeds. It sends tools with every chat."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import BrowserContext, expect
from tests.api.process import Server
from tests.clients.installed import environment

# It is 2.9 GB, and starts in half a minute to a minute.
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="Open WebUI runs on Python 3.11 and 3.12"),
]

# The build of torch that the development packages pin, since another one may bring gigabytes for GPUs.
REQUIREMENTS = ("open-webui==0.12.4", "torch==2.13.0")
QUESTION = "Why is the sky blue?"
PARAMETERS = {"temperature": 0, "max_tokens": 60}
DOCUMENT = (
    "The lighthouse of Veldmark was built in 1871. Its lamp burned oil until 1902, and its tower is 41 metres high.\n\n"
    "The ferry from Veldmark to Osterhaven leaves each day at half past six in the morning.\n"
)
_START = "from open_webui import app; app()"
_READY_S = 300.0
_GROWTH = """
window.lengths = new Set();
new MutationObserver(() => {
  const answer = [...document.querySelectorAll(".chat-assistant")].at(-1);
  if (answer) window.lengths.add(answer.innerText.trim().length);
}).observe(document, {subtree: true, childList: true, characterData: true});
"""


@pytest.fixture(scope="module")
def model() -> Iterator[Server]:
    # One sequence at a time: Open WebUI also asks for a title, and an answer beside another one may have other words.
    # They wait for each other.
    flags = (
        "--model",
        "embed=minilm",
        "--load",
        "all",
        "--engine",
        "openvino",
        "--max-sequences",
        "1",
        "--queue-s",
        "100",
    )
    with contextlib.closing(Server("smollm2", *flags)) as running:
        yield running.wait_ready(timeout_s=280)


@pytest.fixture(scope="module")
def open_webui(model: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. Nothing leaves the machine: it fetches no models, looks for no news and reports nothing."""
    python = environment("open-webui", *REQUIREMENTS)
    directory = tmp_path_factory.mktemp("open-webui")
    settings = {
        "DATA_DIR": str(directory),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "unused",
        "OPENAI_API_BASE_URL": f"{model.url}/v1",
        "OPENAI_API_KEY": "unused",
        "DEFAULT_MODELS": "smollm2",
        "DEFAULT_MODEL_PARAMS": json.dumps(PARAMETERS),
        "ENABLE_OLLAMA_API": "False",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": "embed",
        "RAG_OPENAI_API_BASE_URL": f"{model.url}/v1",
        "RAG_OPENAI_API_KEY": "unused",
        "AUDIO_STT_ENGINE": "openai",
        "ANONYMIZED_TELEMETRY": "False",
        "DO_NOT_TRACK": "True",
        "SCARF_NO_ANALYTICS": "True",
        "NO_PROXY": "127.0.0.1",
    }
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    log = directory / "log.txt"
    with log.open("w") as said:
        process = subprocess.Popen(
            [str(python), "-c", _START, "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=directory, env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    transport = httpx.HTTPTransport(retries=0)
    with httpx.Client(transport=transport, trust_env=False, timeout=5) as client:
        for _ in range(int(_READY_S)):
            assert process.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/health").status_code == 200:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
    pytest.fail(f"Open WebUI does not answer:\n{log.read_text()[-3000:]}")


async def test_a_chat(model: Server, open_webui: str, context: BrowserContext) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], **PARAMETERS}
    answer = str(model.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]).strip()
    assert len(answer.split()) > 20
    page = await context.new_page()
    page.set_default_timeout(120_000)
    await page.add_init_script(_GROWTH)
    await page.goto(open_webui)
    news = page.get_by_role("button", name="Okay, Let's Go!")
    await page.add_locator_handler(news, lambda: news.click())
    await page.locator("#chat-input").click()
    await page.keyboard.type(QUESTION)
    await page.keyboard.press("Enter")
    words = map(re.escape, answer.split())
    shown = re.compile(r"\s*".join(["", *words, "$"]))  # there is no white space between two paragraphs
    await expect(page.locator(".chat-assistant")).to_have_text(shown, timeout=120_000)
    assert await page.evaluate("window.lengths.size") > 5, "it came in one piece"


async def test_a_question_about_a_document(model: Server, open_webui: str) -> None:
    """The document and the question become vectors here, and what Open WebUI finds by them is in the prompt."""
    async with httpx.AsyncClient(base_url=open_webui, trust_env=False, timeout=300) as client:
        signed_in = await client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
        client.headers["authorization"] = f"Bearer {signed_in.json()['token']}"
        before = _num_embedded(model)
        sent = await client.post(
            "/api/v1/files/", params={"process_in_background": False}, files={"file": ("ferry.txt", DOCUMENT.encode())}
        )
        file_id = sent.json()["id"]
        stored = (await client.get(f"/api/v1/files/{file_id}")).json()
        assert stored["data"].get("status") == "completed", stored["data"]
        after = _num_embedded(model)
        assert after > before
        question = {"role": "user", "content": "When does the ferry leave?"}
        body = {"model": "smollm2", "messages": [question], "stream": False, **PARAMETERS}
        plain = (await client.post("/api/chat/completions", json=body)).json()
        assert _num_embedded(model) == after, "a question without a document needs no vectors"
        asked = await client.post("/api/chat/completions", json=body | {"files": [{"type": "file", "id": file_id}]})
        answer = asked.json()
    assert _num_embedded(model) > after
    assert "half past six" in " ".join(answer["sources"][0]["document"])
    assert answer["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + len(DOCUMENT.split())
    assert answer["choices"][0]["message"]["content"]


def _num_embedded(model: Server) -> float:
    """Return how many requests for embeddings the server has got."""
    found = re.search(r'^tailrace_requests_total\{model="embed"\} (\S+)', model.http.get("/metrics").text, re.MULTILINE)
    assert found
    return float(found[1])
