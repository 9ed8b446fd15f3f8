"""Brings the grammars of requests into the form that the engine supports, and checks that it takes them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping

from tailrace.engines.grammars.check import GrammarCheck
from tailrace.errors import QueueFull, RequestError
from tailrace.generation.grammar_forms import engine_form
from tailrace.schemas import Reach, looser
from tailrace.schemas.conjunction import SchemaError
from tailrace.schemas.plain import NO_ANSWER
from tailrace.types import Grammar

__all__ = ["GrammarFitter"]

_MAX_CACHED = 1024
_NAMES = {"cfg": "grammar", "tags": "structural tag"}


class GrammarFitter:
    """For one model and one event loop, which it never blocks. `control_tokens` are those of the model, by their
    text."""

    def __init__(self, check: GrammarCheck, reach: Reach, control_tokens: Mapping[str, int]) -> None:
        self._check = check
        self._reach = reach
        self._control_tokens = control_tokens
        self._fitted: OrderedDict[bytes, Grammar] = OrderedDict()
        self._turn = asyncio.Semaphore(1)  # a hostile schema takes a core for a second

    async def fit(self, grammar: Grammar, *, call_format: str, caller: str, within_s: float) -> Grammar:
        """Return a grammar that the engine takes. `call_format` is as in `engine_form`. What the grammar cannot keep is
        left open.

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

    @contextlib.asynccontextmanager
    async def _my_turn(self, within_s: float) -> AsyncIterator[None]:
        """Raises: QueueFull."""
        try:
            async with asyncio.timeout(within_s):
                await self._turn.acquire()
        except TimeoutError:
            raise QueueFull("Too many new schemas are waiting.", retry_after_s=1.0) from None
        try:
            yield
        finally:
            self._turn.release()

    async def _loosen(self, grammar: Grammar, call_format: str, *, caller: str, within_s: float) -> Grammar:
        """Try to keep everything, then less and less."""
        name = _NAMES.get(grammar.kind, "JSON schema")
        refused = RequestError(f"{grammar.param}: this {name} cannot be used.", param=grammar.param)
        for reach in looser(self._reach):
            try:
                async with self._my_turn(within_s):
                    fitted = await asyncio.to_thread(engine_form, grammar, call_format, reach, self._control_tokens)
                if not (fitted.is_free or reach.is_passed_on):
                    await self._check.check(fitted, caller=caller, within_s=within_s)
            except SchemaError as error:
                reason = f"{grammar.param}: this {name} cannot be used: {error}."
                refused = RequestError(reason, param=grammar.param)
            except RequestError as error:
                refused = RequestError(error.message, param=grammar.param)
            else:
                return fitted
            if NO_ANSWER in refused.message or grammar.kind == "cfg":  # there is nothing looser
                break
        raise refused
