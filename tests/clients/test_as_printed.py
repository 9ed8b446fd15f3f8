"""Client code from the pages that tailrace follows, unchanged except for the address."""

from __future__ import annotations

import ast
import codecs
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.api.process import Server, environment
from tests.clients.installed import run_javascript_source
from tests.http.wire import as_json, sse_data
from tests.waiting import LONG_S

from tailrace.text import Tokenizer
from tailrace_outer.scripted.scripted_engine import TEXTS, recited_tokens, tokenizer_json

RAY_TEXTBOT = """
import requests

prompt = "Tell me a story about dogs."

response = requests.post(f"http://localhost:8000/?prompt={prompt}", stream=True)
response.raise_for_status()
for chunk in response.iter_content(chunk_size=None, decode_unicode=True):
    print(chunk, end="")

    # Dogs are the best.
"""

FASTAPI_QUERY_STREAM = """
import requests

# Sending the query in the get request parameter

query = "Who are you?"

url = f"http://127.0.0.1:8000/query-stream/?query={query}"

with requests.get(url, stream=True) as r:
    for chunk in r.iter_content(1024):
        print(chunk)
"""

# What the article gives its reader to do: "Making it a post request".
FASTAPI_QUERY_STREAM_POSTED = (
    FASTAPI_QUERY_STREAM.replace("?query={query}", "").replace("get(url, ", 'post(url, json={"query": query}, '),
    FASTAPI_QUERY_STREAM.replace("?query={query}", "").replace("get(url, ", 'post(url, data={"query": query}, '),
)

VLLM_GENERATE_STREAM = """
const prompt = "How are you?";
const url = 'http://theaiedge.io/generate-stream'
const response = await fetch(url, {
method: 'POST',
headers: {
'Content-Type': 'application/json',
},
body: JSON.stringify({ prompt: prompt }),
})
process.stdout.write(`${response.status} ${response.headers.get("content-type")}\\n${await response.text()}`)
"""

TGI_PYTHON = """
from huggingface_hub import InferenceClient

client = InferenceClient("http://127.0.0.1:8080")
for token in client.text_generation("How do you make cheese?", max_new_tokens=12, stream=True):
    print(token)

for details in client.text_generation("How do you make cheese?", max_new_tokens=12, details=True, stream=True):
    print(details)
"""

TGI_ASYNC = """
import asyncio

async def main():
    from huggingface_hub import AsyncInferenceClient

    client = AsyncInferenceClient("http://127.0.0.1:8080")
    async for token in await client.text_generation("How do you make cheese?", stream=True):
        print(token)

asyncio.run(main())
"""

TGI_CURL = """
curl -N 127.0.0.1:8080/generate_stream \\
    -X POST \\
    -d '{"inputs":"What is Deep Learning?","parameters":{"max_new_tokens":20}}' \\
    -H 'Content-Type: application/json'
"""

TGI_JAVASCRIPT = """
import { HfInferenceEndpoint } from '@huggingface/inference'

const hf = new HfInferenceEndpoint('https://YOUR_ENDPOINT.endpoints.huggingface.cloud', 'hf_YOUR_TOKEN')

// prompt
const prompt = 'What can you do in Nuremberg, Germany? Give me 3 Tips'

const stream = hf.textGenerationStream({ inputs: prompt })
for await (const r of stream) {
  // yield the generated token
  process.stdout.write(r.token.text)
}
"""


NAME = "emoji"
TEXT = TEXTS[NAME]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that always gives the same answer; otherwise a prompt without a seed gets a random one."""
    with contextlib.closing(Server(f"scripted:text={list(TEXTS).index(NAME)}")) as server:
        yield server.wait_ready()


def tokens(count: int) -> list[str]:
    """Return the text of each of the first tokens: a character comes with its last byte, half of one with the very last
    token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    vocabulary = Tokenizer(tokenizer_json())
    pieces = [vocabulary.pieces[token_id] for token_id in recited_tokens(list(TEXTS).index(NAME))[:count]]
    return [decoder.decode(piece, index == count) for index, piece in enumerate(pieces, 1)]


def at(server: Server, printed: str, *addresses: str) -> str:
    for address in addresses:
        assert address in printed
        printed = printed.replace(address, f"127.0.0.1:{server.port}")
    return printed


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", script],
        capture_output=True, text=True, timeout=LONG_S, env={**environment(), "NO_PROXY": "*"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_textbot_of_ray(server: Server) -> None:
    assert run(at(server, RAY_TEXTBOT, "localhost:8000")) == TEXT


@pytest.mark.parametrize("script", [FASTAPI_QUERY_STREAM, *FASTAPI_QUERY_STREAM_POSTED], ids=["get", "json", "form"])
def test_query_stream_of_the_article_about_fastapi(server: Server, script: str) -> None:
    printed = run(at(server, script, "127.0.0.1:8000"))
    assert b"".join(ast.literal_eval(line) for line in printed.splitlines()) == TEXT.encode()


def test_generate_stream_of_the_article_about_vllm(server: Server) -> None:
    printed = run_javascript_source(at(server, VLLM_GENERATE_STREAM, "theaiedge.io"))
    head, _, body = printed.partition("\n")
    assert head.startswith("200 text/event-stream")
    *events, done = sse_data(body.encode())
    assert done == "[DONE]"
    texts = [str(as_json(event)["text"]) for event in events]
    assert texts[-1] == TEXT
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts)), "each is the whole text so far"


def test_the_client_of_text_generation_inference(server: Server) -> None:
    printed = run(at(server, TGI_PYTHON, "127.0.0.1:8080"))
    texts = "".join(f"{text}\n" for text in tokens(12))
    assert printed.startswith(texts)
    *details, last = printed.removeprefix(texts).splitlines()
    assert len(details) == 11
    assert all(repr(text) in line for text, line in zip(tokens(12), [*details, last], strict=True))
    assert all("generated_text=None, " in line for line in details)
    assert "finish_reason='length'" in last


def test_the_asynchronous_client_of_text_generation_inference(server: Server) -> None:
    assert run(at(server, TGI_ASYNC, "127.0.0.1:8080")) == "".join(f"{text}\n" for text in [*tokens(32), "<|end|>"])


def test_curl(server: Server) -> None:
    command = at(server, TGI_CURL, "127.0.0.1:8080").replace("curl -N", "curl -sS -N --noproxy '*'")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=LONG_S, check=True)
    events = [as_json(event) for event in sse_data(done.stdout.encode())]
    assert [event["token"]["text"] for event in events] == tokens(20)


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_the_client_in_javascript(server: Server) -> None:
    script = at(server, TGI_JAVASCRIPT, "https://YOUR_ENDPOINT.endpoints.huggingface.cloud")
    script = script.replace("'127.", "'http://127.").replace("inference'\n", "inference-2'\n")  # of its time
    assert run_javascript_source(script) == TEXT + "<|end|>"
