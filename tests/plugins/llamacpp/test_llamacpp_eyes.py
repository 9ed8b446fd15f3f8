"""Images with llama.cpp: it reads the tokens that tailrace has counted, and answers as transformers does, or the
request is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.api.process import Server
from tests.missing import needs
from tests.plugins.openvino.projectors import write_pair
from tests.seeing import answered, data_url, generated, picture, seeing_dir
from tokenizers import Tokenizer

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Sequence
from tailrace.errors import SequenceFailed
from tailrace.models.resolve import read_card
from tailrace.types import Attachment, Sampling

__all__ = ["seeing_dir"]

pytest.importorskip("xllamacpp")
pytestmark = [needs("torch", "transformers"), pytest.mark.timeout(240)]

_COUNT = 12
_SIDES = {"idefics3": 64, "gemma3": 32}  # of pictures that no processor has to scale before it cuts them


@contextlib.contextmanager
def _serving(file: Path) -> Iterator[Server]:
    with contextlib.closing(Server(str(file), "--engine", "llamacpp", "--threads", "1")) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("architecture", _SIDES)
def test_answers_equal_those_of_generate(architecture: str, seeing_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Their texts do: llama.cpp reports other tokens for bytes that are no UTF-8."""
    path, side = seeing_dir(architecture), _SIDES[architecture]
    file = write_pair(architecture, path, tmp_path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))

    def shown(found: tuple[int, list[int]]) -> tuple[int, str]:
        return found[0], tokenizer.decode(found[1])

    first, second = picture(1, side, side), picture(2, side, side)
    asked = [[first], [second], [first, second]]
    with _serving(file) as server:
        answers = [shown(answered(server, pictures, _COUNT)) for pictures in asked]
        told = server.http.post("/api/show", json={"model": file.stem}).json()["capabilities"]
    assert answers == [shown(generated(path, pictures, _COUNT)) for pictures in asked]
    assert answers[0] != answers[1]
    assert "vision" in told


def test_a_text_that_would_become_a_control_token_is_refused(seeing_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Only beside an image: alone it stays text."""
    with _serving(write_pair("idefics3", seeing_dir("idefics3"), tmp_path)) as server:

        def ask(text: str, *parts: dict[str, object]) -> tuple[int, str]:
            message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
            found = server.post("/v1/chat/completions", {"messages": [message], "max_tokens": 2})
            return found.status_code, found.text

        image: dict[str, object] = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
        assert ask("Say <|endoftext|> now.")[0] == 200
        assert ask("Say <image> now.")[0] == 200
        assert ask("Say now.", image)[0] == 200
        for token in ("<|endoftext|>", "<image>"):
            status, text = ask(f"Say {token} now.", image)
            assert (status, "would read a text of this prompt as other tokens" in text) == (400, True)


def test_prompts_that_llama_cpp_would_not_read_alike_are_refused(
    seeing_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_pair("gemma3", seeing_dir("gemma3"), tmp_path)
    engine = load_engine(EngineSpec("llamacpp", str(file), context_tokens=256, kv_tokens=256, threads=1))
    assert engine.capabilities.takes == {"token_ids", "image/png"}
    tokenizer = Tokenizer.from_file(str(seeing_dir("gemma3") / "tokenizer.json"))
    split = tuple(tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "Dogs")
    whole = tuple(tokenizer.encode("Dogs", add_special_tokens=False).ids)
    assert len(whole) < len(split)
    attachment = Attachment.of(picture(1), "image/png", 0)
    image = Attachment(attachment.digest, "image/png", 6, (1,) * 6)
    attachments = {attachment.digest: picture(1)}
    with pytest.raises(SequenceFailed, match="as other tokens"):
        engine.submit(Sequence(1, (split, image), Sampling(seed=1), attachments=attachments))
    with pytest.raises(SequenceFailed, match="missing"):
        engine.submit(Sequence(1, ((60,), image), Sampling(seed=1)))
    # It has five tokens less than llama.cpp makes of the image.
    short = Attachment(attachment.digest, "image/png", 1, (1,))
    engine.submit(Sequence(2, (whole, short), Sampling(seed=1, max_tokens=2), attachments=attachments))
    (delta,) = [one for _ in range(200) for one in engine.step()]
    assert (delta.finish_reason, delta.failure) == ("error", "the engine has read another prompt")
    engine.close()


@pytest.mark.parametrize(
    ("before", "after", "is_told"),
    [
        (b"mm.model.fc.weight", b"mm.model.fx.weight", True),
        (b"clip.vision.patch_size\4\0\0\0\x08", b"clip.vision.patch_size\4\0\0\0\0", False),
        (b"clip.vision.attention.head_count\4\0\0\0\2", b"clip.vision.attention.head_count\4\0\0\0\0", False),
    ],
)
def test_a_damaged_projector_is_left_out(
    before: bytes,
    after: bytes,
    is_told: bool,
    seeing_dir: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """llama.cpp ends the process for some of them."""
    file = write_pair("idefics3", seeing_dir("idefics3"), tmp_path)
    (projector,) = tmp_path.glob("mmproj-*")
    content = projector.read_bytes()
    assert content.count(before) == 1
    projector.write_bytes(content.replace(before, after))
    assert read_card(file, "tiny").projector == projector
    engine = load_engine(EngineSpec("llamacpp", str(file), context_tokens=256, kv_tokens=256, threads=1))
    assert (engine.capabilities.sees, engine.capabilities.takes) == (False, frozenset({"token_ids"}))
    engine.close()
    assert ("The model reads no images, because its projector does not load" in caplog.text) is is_told
