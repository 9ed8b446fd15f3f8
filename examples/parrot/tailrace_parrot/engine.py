from tailrace.engines import Capabilities, Delta, EngineSpec, Sequence
from tailrace.errors import SequenceFailed


class ParrotEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self._end = spec.eos_token_ids[:1]
        self._running: dict[int, tuple[Sequence, int]] = {}  # and how many tokens each has so far
        self._aborted: set[int] = set()
        self.capabilities = Capabilities(
            engine="parrot 1",
            context_tokens=spec.context_tokens,
            kv_tokens=spec.kv_tokens,
            block_tokens=1,
            max_sequences=spec.max_sequences,
            parameters=frozenset({"ignore_eos", "temperature"}),
            exact=True,
        )

    def submit(self, sequence: Sequence) -> None:
        if len(sequence.prompt_ids) > self.capabilities.context_tokens:
            raise SequenceFailed("The prompt is too long.")
        self._running[sequence.sequence_id] = sequence, 0

    def abort(self, sequence_id: int) -> None:
        self._aborted.add(sequence_id)

    def step(self) -> list[Delta]:
        deltas = [self._next(sequence, start) for sequence, start in self._running.values()]
        self._running = {
            delta.sequence_id: (self._running[delta.sequence_id][0], delta.start + 1)
            for delta in deltas
            if delta.finish_reason is None
        }
        self._aborted.clear()
        return deltas

    def _next(self, sequence: Sequence, start: int) -> Delta:
        sequence_id, prompt_ids, sampling = sequence.sequence_id, sequence.prompt_ids, sequence.sampling
        if sequence_id in self._aborted:
            return Delta(sequence_id, start, (), finish_reason="cancelled")
        if start == len(prompt_ids) and self._end and not sampling.ignore_eos:
            return Delta(sequence_id, start, self._end, finish_reason="stop")
        is_last = start + 1 == sampling.max_tokens
        token_id = prompt_ids[start % len(prompt_ids)]
        return Delta(sequence_id, start, (token_id,), finish_reason="length" if is_last else None)

    def close(self) -> None:
        self._running.clear()
