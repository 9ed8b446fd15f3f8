"""Tiny models and their sources: GGUF files, wheels and a package index, made for the tests."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.models.fake_hub import Hub, running_hub
from tests.waiting import LONG_S

from tailrace.models import CatalogueEntry


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty TAILRACE_HOME, and run pip without settings of this machine."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class Recorder:
    """A Progress that records all calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | int | None]] = []

    def start(self, label: str, total_bytes: int | None) -> None:
        self.calls.append(("start", label))

    def advance(self, num_bytes: int) -> None:
        self.calls.append(("advance", num_bytes))

    def done(self) -> None:
        self.calls.append(("done", None))

    def message(self, text: str) -> None:
        self.calls.append(("message", text))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def _wheel(member: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


@dataclasses.dataclass(frozen=True)
class Parcel:
    """An entry of the catalogue and its wheel."""

    entry: CatalogueEntry
    content: bytes
    wheel: bytes

    file_name = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def make_parcel() -> Callable[[bytes], Parcel]:
    def make(content: bytes) -> Parcel:
        wheel = _wheel("tiny_model/tiny.gguf", content)
        entry = CatalogueEntry(
            name="tiny",
            package="tiny-model",
            version="1.0",
            member="tiny_model/tiny.gguf",
            wheel_bytes=len(wheel),
            file_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            license="Apache-2.0",
        )
        return Parcel(entry, content, wheel)

    return make


@pytest.fixture
def parcel(make_parcel: Callable[[bytes], Parcel]) -> Parcel:
    return make_parcel(b"GGUF" + os.urandom(300_000))


@pytest.fixture
def find_links(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only directory that pip may use."""
    directory = tmp_path / "links"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


class Index:
    """A package index with one wheel. It pauses in the middle of the wheel until `go` is set."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.status = 200
        self.downloads = 0
        self.half_sent = threading.Event()
        self.go = threading.Event()
        index = self

        class Requests(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if index.status != 200:
                    self.send_error(index.status)
                elif self.path.endswith(".whl"):
                    index.downloads += 1
                    self._send("application/zip", index.wheel)
                else:
                    name = Parcel.file_name
                    self._send("text/html", f'<a href="/files/{name}">{name}</a>'.encode())

            def _send(self, kind: str, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body[: len(body) // 2])
                    if kind == "application/zip":
                        index.half_sent.set()
                        index.go.wait(LONG_S)
                    self.wfile.write(body[len(body) // 2 :])
                except OSError:
                    self.close_connection = True  # the client was killed, which is what some tests are about

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/simple"


@pytest.fixture
def index(home: Path, parcel: Parcel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index(parcel.wheel)
    thread = threading.Thread(target=index.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    yield index
    index.go.set()
    index.server.shutdown()
    index.server.server_close()
    thread.join()


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file of a few kilobytes: bytes, a few merges, three control tokens and one user-defined token."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    def write(
        name: str = "tiny.gguf", *, architecture: str = "llama", pre: str | None = "smollm", **values: object
    ) -> Path:
        path = tmp_path / name
        alphabet = sorted(ByteLevel.alphabet())
        control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        tokens = [*control, *alphabet, "he", "ll", "hell", "hello", "<tool>"]
        types = [3, 3, 3, *[1] * (len(alphabet) + 4), 4]
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(512)
        writer.add_tokenizer_model(str(values.get("model", "gpt2")))
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(values.get("types", types))  # type: ignore[arg-type]  # also wrong ones, on purpose
        writer.add_token_merges(values.get("merges", ["h e", "l l", "he ll", "hell o"]))  # type: ignore[arg-type]
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(int(str(values.get("eos", 2))))
        if "add_bos" in values:
            writer.add_add_bos_token(bool(values["add_bos"]))
        if "temp" in values:
            writer.add_float32("general.sampling.temp", float(str(values["temp"])))
            writer.add_int32("general.sampling.top_k", 20)
        writer.add_chat_template("{{ messages }}")
        writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub(tmp_path / "hf") as hub:
        yield hub


@pytest.fixture
def refusing_port() -> Iterator[int]:
    """Return a port that is bound, so that no other process gets it, but does not listen."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])
