"""The document at `/openapi.json` agrees with the server."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from tests.api.process import Server
from tests.waiting import LONG_S

from tailrace.api.openapi import routes_page

Document = dict[str, Any]  # Any: of JSON


@pytest.fixture(scope="module")
def document(server: Server) -> Document:
    found: Document = httpx.get(server.url + "/openapi.json").json()
    return found


def examples(document: Document, kind: str) -> Iterator[tuple[str, str, Any]]:
    """Yield method, path and example of all bodies of this media type."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for name, content in operation.get("requestBody", {}).get("content", {}).items():
                assert "example" in content, f"{method} {path} has no example"
                if name != kind or path.startswith("/v1/admin/"):  # which needs a key, and this server has none
                    continue
                yield method, path, content["example"]


# Of models that the scripted one is not.
_OF_OTHER_MODELS = (
    "/api/embed",
    "/api/embeddings",
    "/embed",
    "/embedding",
    "/embeddings",
    "/rerank",
    "/similarity",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
)


def test_every_example_works_when_pasted(server: Server, document: Document) -> None:
    made = httpx.post(server.url + "/v1/conversations", json={}, trust_env=False).json()
    names = {"model": "scripted", "version": "1", "conversation_id": made["id"], "path": "talks/1"}
    ((_, path, form),) = examples(document, "multipart/form-data")
    rows = {"file": ("rows.jsonl", form.pop("file"))}
    uploaded = httpx.post(server.url + path, files=rows, data=form, trust_env=False).json()
    every = [*examples(document, "application/json"), *examples(document, "*/*")]
    for method, path, example in every:
        if path == "/v1/batches":
            example["input_file_id"] = uploaded["id"]
        if path == "/v1/shares":
            example["conversation_id"] = made["id"]
        filled = re.sub(r"\{([a-z_]+)\}", lambda match: names[match[1]], path)
        answer = httpx.request(method, server.url + filled, json=example, timeout=LONG_S)
        if path in _OF_OTHER_MODELS:
            assert "This model cannot" in answer.text
            continue
        assert answer.status_code in (200, 201, 204), (method, path, answer.text)
        assert answer.text or path == "/v1/durable/{path}"


def test_every_operation_has_a_name_of_its_own(document: Document) -> None:
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def run_schemathesis(server: Server, folder: Path, num_examples: int) -> None:
    """Send valid and invalid requests of the schema: no 500, and no status, media type or shape that the document does
    not have."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "schemathesis"), "run", server.url + "/openapi.json",
         "--max-examples", str(num_examples), "--phases", "examples,coverage,fuzzing,stateful", "--mode", "all",
         "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
         "unsupported_method",
         # A live read of a durable stream lasts a minute.
         "--exclude-operation-id", "durable_read",
         "--request-timeout", "20", "--seed", "1", "--no-color", "--suppress-health-check", "all"],
        capture_output=True, text=True, cwd=folder, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_schemathesis_finds_nothing(serve: Callable[..., Server], tmp_path: Path) -> None:
    # Answers end by themselves, since a schema knows nothing of max_tokens.
    server = serve("scripted:eos_after=8", "--body-gap-s", "5")
    run_schemathesis(server, tmp_path, 40)
    assert "Traceback" not in server.log


def test_docs_lists_every_route_and_loads_nothing_from_elsewhere(server: Server, document: Document) -> None:
    answer = httpx.get(server.url + "/docs", trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; ")
    listed = re.findall(r"<dt><code>([A-Z]+) (\S+)</code></dt>", answer.text)
    operations = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert {(method, html.unescape(path)) for method, path in listed} == operations
    loaded = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
    assert "openapi.json" in loaded
    for address in loaded:
        whole = urljoin(f"{server.url}/docs", address)
        assert whole.startswith(f"{server.url}/")
        assert httpx.get(whole, headers={"accept": "text/html"}, trust_env=False).status_code == 200
    assert "<script" not in answer.text
    assert "style=" not in answer.text


def test_docs_escapes_what_it_shows() -> None:
    operation = {
        "tags": ["<t>"],
        "summary": "<b>",
        "requestBody": {"content": {"application/json": {"example": "</pre>"}}},
    }
    shown = routes_page(
        {
            "info": {"title": "<i>", "version": "&", "description": "<u>"},
            "tags": [{"name": "<t>", "description": "<h>"}],
            "paths": {"/<p>": {"get": operation}},
        }
    ).decode()
    for text in ("<i>", "<b>", "<u>", "<h>", "/<p>"):
        assert html.escape(text) in shown
    assert shown.count("</pre>") == 1
