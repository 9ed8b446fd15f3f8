"""Brings the grammars of requests into the form that the engine supports, and checks that it takes them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from tailrace.engines.grammars.check import GrammarCheck
from tailrace.errors import RequestError
from tailrace.schemas import Reach, looser, plain_form
from tailrace.schemas.answers import SchemasAsked
from tailrace.schemas.calls import AskedCalls, plain_calls, schema_of_call
from tailrace.schemas.conjunction import SchemaError
from tailrace.schemas.plain import NO_ANSWER
from tailrace.schemas.portable import check_portable
from tailrace.types import Grammar

__all__ = ["GrammarFitter"]

_MAX_CACHED = 1024
_decode = msgspec.json.decode


class GrammarFitter:
    """For one model and one event loop, which it never blocks."""

    def __init__(self, check: GrammarCheck, reach: Reach) -> None:
        self._check = check
        self._reach = reach
        self._fitted: OrderedDict[bytes, Grammar] = OrderedDict()
        self._turn = asyncio.Semaphore(1)  # a hostile schema takes a core for 0.2 s

    async def fit(self, grammar: Grammar, *, call_format: str, caller: str, within_s: float) -> Grammar:
        """Return a grammar that the engine takes. `call_format`: in which the model writes calls; "" if it was not
        trained for them. What the grammar cannot keep is left open.

        Raises: RequestError if it cannot be used, QueueFull if too many checks wait, EngineLost if the check fails.
        """
        if grammar.kind == "regex":
            await self._check.check(grammar, caller=caller, within_s=within_s)
            return grammar
        key = hashlib.sha256(repr((grammar, call_format)).encode()).digest()
        if key in self._fitted:
            self._fitted.move_to_end(key)
            return self._fitted[key]
        fitted = await self._loosen(grammar, call_format, caller=caller, within_s=within_s)
        self._fitted[key] = fitted
        if len(self._fitted) > _MAX_CACHED:
            self._fitted.popitem(last=False)
        return fitted

    async def _loosen(self, grammar: Grammar, call_format: str, *, caller: str, within_s: float) -> Grammar:
        """Try to keep everything, then less and less."""
        refused = RequestError(f"{grammar.param}: this schema cannot be used.", param=grammar.param)
        for reach in looser(self._reach):
            try:
                async with self._turn:
                    fitted = await asyncio.to_thread(_fitted, grammar, call_format, reach)
                if not fitted.is_free:
                    await self._check.check(fitted, caller=caller, within_s=within_s)
            except SchemaError as error:
                refused = _refusal(grammar, str(error))
            except RequestError as error:
                refused = RequestError(error.message, param=grammar.param)
            else:
                return fitted
            if NO_ANSWER in refused.message:
                break
        raise refused


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(f"{grammar.param}: this JSON schema cannot be used: {reason}.", param=grammar.param)


def _fitted(grammar: Grammar, call_format: str, reach: Reach) -> Grammar:
    """Raises: SchemaError."""
    return _SORTS[grammar.kind](grammar, call_format, reach)


def _of_schema(grammar: Grammar, call_format: str, reach: Reach) -> Grammar:
    asked = _decode(grammar.source)
    plain = plain_form(asked, reach)
    left_open = tuple(grammar.param + path for path in plain.left_open)
    return replace(
        grammar,
        source=_source(plain.schema, reach),
        left_open=left_open,
        asked=_asked(SchemasAsked(asked)) if left_open else "",
    )


def _of_calls(grammar: Grammar, call_format: str, reach: Reach) -> Grammar:
    asked = _decode(grammar.source, type=AskedCalls)
    plain = plain_calls(asked, reach)
    schemas = SchemasAsked(asked.answer if not asked.forced else None, {tool.name: tool.schema for tool in asked.tools})
    if asked.forced:
        return Grammar(
            "json_schema",
            _source(schema_of_call(plain), reach),
            grammar.param,
            asked=_asked(schemas) if plain.left_open else "",
            left_open=plain.left_open,
        )
    return Grammar("free", "", grammar.param, _asked(schemas), (asked.answer_param, *plain.left_open))


_SORTS: dict[str, Callable[[Grammar, str, Reach], Grammar]] = {"json_schema": _of_schema, "calls": _of_calls}


def _source(schema: dict[str, Any], reach: Reach) -> str:
    if reach.is_portable:
        check_portable(schema)
    return msgspec.json.encode(schema).decode()


def _asked(asked: SchemasAsked) -> str:
    return msgspec.json.encode(asked).decode()
