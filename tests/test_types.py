from __future__ import annotations

import gc

import msgspec
import pytest

from tailrace.engines.interface import Delta, Sequence
from tailrace.engines.protocol import Submit, decode_to_worker, encode
from tailrace.types import End, Failure, GenerateRequest, Grammar, Sampling, TextDelta, Usage


def test_objects_of_each_token_are_not_garbage_collected() -> None:
    """With tracked objects, the garbage collector took a third of the server's time at full speed."""
    events = [TextDelta("a", (1,)), End("done", Usage(1, 1)), Delta(1, 0, (1,))]
    assert not any(gc.is_tracked(event) for event in events)


def test_events_and_requests_do_not_change() -> None:
    with pytest.raises(AttributeError):
        TextDelta("a", (1,)).text = "b"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        End("done", Usage(1, 1)).status = "error"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Sampling().n = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        GenerateRequest().prompts = ("a",)  # type: ignore[misc]


def test_events_are_compared_by_value() -> None:
    assert End("error", Usage(1, 2), Failure("a", "b")) == End("error", Usage(1, 2), Failure("a", "b"))
    assert TextDelta("a", (1,)) != TextDelta("a", (2,))


def test_every_sampling_parameter_reaches_the_worker() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=1.25,
        seed=2**64 - 1,
        max_tokens=9,
        stop=("a", "é"),
        include_stop=True,
        include_special=True,
        prompt_logprobs=2,
        single_call=True,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=5,
        logit_bias=((7, -100.0), (9, 0.5)),
        min_tokens=2,
        stop_token_ids=(3, 5),
        allowed_token_ids=(3, 5, 7),
        bad_words=((1, 2), (9,)),
        grammar=Grammar("regex", "[a-zé]+"),
        n=2,
        max_reasoning_tokens=5,
    )
    plain = Sampling()
    assert not [name for name in Sampling.__struct_fields__ if getattr(sampling, name) == getattr(plain, name)]
    sequence = Sequence(7, ((1, 2, 3),), sampling)
    sent = encode(Submit(sequence))[4:]  # behind the length
    received = decode_to_worker(sent)
    assert isinstance(received, Submit)
    assert received.sequence == sequence


def test_default_sampling_has_neutral_values() -> None:
    """An absent parameter must not look like one that the engine has to support."""
    plain = Sampling()
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p, plain.repetition_penalty) == (1, 1, 0, 0, 1)
    assert (plain.presence_penalty, plain.frequency_penalty, plain.typical_p, plain.n) == (0, 0, 1, 1)
    assert (plain.seed, plain.max_tokens, plain.stop) == (None, None, ())
    assert (plain.include_stop, plain.single_call, plain.ignore_eos, plain.logprobs) == (False,) * 4
    assert (plain.top_logprobs, plain.logit_bias, plain.grammar) == (0, (), None)


def test_a_seed_beyond_the_protocol_cannot_be_sent() -> None:
    """The dialects and the generation limit seeds."""
    for seed in (-1 - 2**63, 2**64):
        with pytest.raises((OverflowError, msgspec.MsgspecError)):
            encode(Submit(Sequence(1, ((1,),), Sampling(seed=seed))))
