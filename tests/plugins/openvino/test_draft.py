"""OpenVINO with a draft model: the laws, the same tokens as without, and guesses that follow what was right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.engines.lora import random_pairs, save
from tests.engines.shared import ON_ITS_OWN, SHARED_LAWS, Shared, run_all
from tests.plugins.openvino.pairs import PIECES, tiny_llama

from tailrace.engines import EngineSpec, load_engine
from tailrace.engines.interface import Delta, Engine, Sequence
from tailrace.engines.schedule import FREE, Schedule
from tailrace.models.resolve import read_card
from tailrace.testing import Law, laws
from tailrace.types import Grammar, Sampling
from tailrace_kit.sampler import Row
from tailrace_plugins.openvino.draft_model import DraftModel
from tailrace_plugins.openvino.model_loading import load_runner
from tailrace_plugins.openvino.scheduler import SequenceState
from tailrace_plugins.openvino.speculation import Drafted

PROMPT = tuple(range(20, 120))
ITSELF, OTHER = "itself", "other"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    path = tmp_path_factory.mktemp("pair")
    return EngineSpec(
        engine="openvino",
        path=str(tiny_llama(path / ITSELF, 1)),
        context_tokens=384,
        kv_tokens=8192,
        max_sequences=16,
        max_step_tokens=128,
        eos_token_ids=(0,),
        cache_path=str(path / "prepared"),
        exact=True,
    )


@pytest.fixture(scope="module")
def with_draft(spec: EngineSpec) -> Callable[[str], EngineSpec]:
    path = Path(spec.path).parent
    tiny_llama(path / OTHER, 2, num_rows=PIECES - 8)  # some ids are not in its embedding
    return lambda name: msgspec.structs.replace(spec, draft=str(path / name), draft_tokens=4)


@pytest.fixture(scope="module", params=[pytest.param(ITSELF, marks=pytest.mark.deep), OTHER])
def engine(request: pytest.FixtureRequest, with_draft: Callable[[str], EngineSpec]) -> Iterator[Shared]:
    engine = load_engine(with_draft(request.param))
    yield Shared(engine)
    engine.close()


@pytest.mark.parametrize("law", SHARED_LAWS, ids=str)
def test_engine_keeps(law: Law, engine: Shared) -> None:
    if not law.applies_to(engine.capabilities):
        pytest.skip("an engine that is not exact does not promise it")
    law(engine, vocab_size=PIECES - 20, num_sequences=64)


def test_closing(with_draft: Callable[[str], EngineSpec]) -> None:
    next(law for law in laws if law.name == ON_ITS_OWN)(lambda: load_engine(with_draft(ITSELF)), vocab_size=300)


@pytest.fixture(scope="module")
def default_engine(openvino_spec: EngineSpec) -> Iterator[Shared]:
    spec = msgspec.structs.replace(openvino_spec, draft=openvino_spec.path, draft_tokens=3, exact=True)
    engine = load_engine(spec)
    yield Shared(engine)
    engine.close()


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("law", SHARED_LAWS, ids=str)
def test_the_default_model_as_its_own_draft_keeps(law: Law, default_engine: Shared) -> None:
    if not law.applies_to(default_engine.capabilities):
        pytest.skip("an engine that is not exact does not promise it")
    law(default_engine, vocab_size=40_000, num_sequences=64)


def _run(engine: Engine | Shared, *sequences: Sequence) -> list[list[Delta]]:
    return list(run_all(engine, *sequences).values())


def _content(deltas: list[Delta]) -> tuple[object, ...]:
    """What clients see, however many tokens came together."""
    return (
        [token_id for delta in deltas for token_id in delta.token_ids],
        [logprob for delta in deltas for logprob in delta.logprobs],
        [top for delta in deltas for top in delta.top_logprobs],
        deltas[-1].finish_reason,
    )


_ASKED = (
    Sampling(),
    Sampling(logprobs=True, top_logprobs=3),
    Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(min_tokens=20, stop_token_ids=tuple(range(30, 60))),
    Sampling(stop_token_ids=tuple(range(100, 130))),
    Sampling(grammar=Grammar("regex", "(river mill ){2,4}bridge[a-z]*")),
    Sampling(logit_bias=((40, 5.0),), top_k=5, min_p=0.1, bad_words=((41, 42),)),
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_change_no_token(engine: Shared, spec: EngineSpec, temperature: float) -> None:
    """A row with guesses runs in a batch, so it is compared with one that never runs alone."""
    if not engine.capabilities.exact:
        pytest.skip("an engine that is not exact does not promise it")
    sequences = [
        Sequence(number, (PROMPT[number:],), replace(asked, temperature=temperature, seed=number, max_tokens=60))
        for number, asked in enumerate(_ASKED)
    ]
    plain = load_engine(msgspec.structs.replace(spec, never_alone=True))
    try:
        without = _run(plain, *sequences)
    finally:
        plain.close()
    in_batch = [Sequence(one.sequence_id, (one.prompt_ids,), one.sampling, Schedule((60,))) for one in sequences]
    guessed = _run(engine, *in_batch)
    assert [_content(one) for one in guessed] == [_content(one) for one in without]


def _greedy(number: int, prompt: tuple[int, ...], schedule: Schedule = FREE, adapter: str = "") -> Sequence:
    sampling = Sampling(temperature=0.0, seed=0, max_tokens=50, ignore_eos=True)
    return Sequence(number, (prompt,), sampling, schedule, adapter)


@pytest.mark.deep
def test_rows_with_adapters(spec: EngineSpec, with_draft: Callable[[str], EngineSpec], tmp_path: Path) -> None:
    """The draft model has no adapter: its guesses are checked by a model that has one."""
    shapes = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.mlp.down_proj": (64, 96)}
    adapters = {
        name: str(save(tmp_path / name, random_pairs(shapes, strength))) for name, strength in (("a", 0.4), ("b", -2.0))
    }
    sequences = [
        _greedy(number, PROMPT[number:], Schedule((60,)), name) for number, name in enumerate(["", "a", "b", "a"])
    ]
    answers = []
    for one in (spec, with_draft(ITSELF)):
        engine = load_engine(msgspec.structs.replace(one, adapters=adapters, kv_precision="f32"))
        try:
            answers.append(_run(engine, *sequences))
        finally:
            engine.close()
    without, guessed = answers
    assert [_content(one) for one in guessed] == [_content(one) for one in without]
    assert len({tuple(token_id for delta in one for token_id in delta.token_ids) for one in without}) == 4
    assert len(guessed[0]) < 20
    assert sum(map(len, guessed)) < sum(map(len, without))


def test_a_model_guesses_what_it_says_itself(with_draft: Callable[[str], EngineSpec]) -> None:
    """Also after a shared beginning, beside others, and after a prompt that it reads in pieces."""
    engine = load_engine(with_draft(ITSELF))
    try:
        one, again = _run(engine, _greedy(1, PROMPT)), _run(engine, _greedy(2, PROMPT), _greedy(3, PROMPT[::-1]))
        (long,) = _run(engine, _greedy(4, PROMPT * 3))
    finally:
        engine.close()
    # 50 tokens: the first one, and steps with four guesses. Before, the draft model reads the prompt, in pieces of 16
    # tokens or more; of a prompt that it has read, only the rest.
    assert len(again[0]) < len(one[0]) < 20
    assert len(again[0]) < 14
    assert len(long) < 32
    assert _content(again[0]) == _content(one[0])


def test_wrong_guesses_are_overwritten(with_draft: Callable[[str], EngineSpec]) -> None:
    engine = load_engine(with_draft(OTHER))
    try:
        (deltas,) = _run(engine, _greedy(1, PROMPT))
    finally:
        engine.close()
    assert 30 < len(deltas) <= 50, "a few guesses are right by chance"


def test_tokens_that_were_alone_get_no_guesses(with_draft: Callable[[str], EngineSpec]) -> None:
    schedule = Schedule((3, 4, 2, 1, 8, 2))
    engine = load_engine(with_draft(ITSELF))
    try:
        (deltas,) = _run(engine, _greedy(1, PROMPT, schedule))
    finally:
        engine.close()
    given = [delta.is_alone for delta in deltas for _ in delta.token_ids]
    assert given[:20] == [bool(schedule.is_alone(index)) for index in range(20)]
    assert max(len(delta.token_ids) for delta in deltas[:-6]) > 1


@pytest.mark.parametrize(
    ("draft_s", "share", "num_rows", "expected"),
    [
        (0.1, 0.9, 1, 5),  # ten guesses cost as much as a token
        (1.0, 1.0, 1, 0),  # a guess costs as much as a token
        (0.1, 0.1, 1, 0),  # most guesses are wrong
        (0.1, 0.9, 40, 0),  # many rows: a step that checks guesses takes several times as long
    ],
)
def test_it_guesses_where_that_pays(
    spec: EngineSpec, draft_s: float, share: float, num_rows: int, expected: int
) -> None:
    draft = DraftModel(load_runner(spec, read_card(Path(spec.path), "")), context_tokens=384, vocab_size=PIECES)
    for times, rows, took_s in (
        (draft.costs.target, 1, 1.0),
        (draft.costs.target, 10, 1.2),
        (draft.costs.target, 40, 4.0),
        (draft.costs.draft, 1, draft_s),
    ):
        times.note(rows, took_s)
    run = SequenceState(Row(_greedy(1, (1, 2, 3)), frozenset()), FREE, table=[0])
    run.drafted = Drafted(0, share)
    (guesses,) = draft.guess([run], [100], num_rows)
    assert len(guesses) == expected


def test_it_looks_again_for_a_hundredth_of_the_time(spec: EngineSpec) -> None:
    draft = DraftModel(load_runner(spec, read_card(Path(spec.path), "")), context_tokens=384, vocab_size=PIECES)
    draft.costs.target.note(1, 1e-3)
    draft.costs.draft.note(1, 1e-3)  # so that no guess pays
    run = SequenceState(Row(_greedy(1, (1, 2, 3)), frozenset()), FREE, table=[0])
    num_steps = 0
    while not draft.guess([run], [100], 1)[0]:
        draft.note_step(1, 1e-3, is_alone=False)
        num_steps += 1
    assert 490 < num_steps < 510, "five guesses take as long as five steps"
