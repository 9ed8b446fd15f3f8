"""The default model with default settings, killed several times."""

from __future__ import annotations

import pytest
from tests.missing import skip_missing

from tailrace.assembly.service import engine_spec
from tailrace.assembly.source import find_source
from tailrace.engines import load_engine
from tailrace.errors import ModelError
from tailrace.models import NoProgress, models_path
from tailrace.settings import Settings
from tailrace_outer.measure.certify import PromptMaker, certify


@pytest.mark.deep
@pytest.mark.timeout(900)
async def test_no_replay_differs() -> None:
    try:
        source = find_source("smollm2", NoProgress())
    except ModelError as error:
        skip_missing("smollm2", error.message)
    settings = Settings(max_sequences=8, kv_tokens=16_384)
    spec = engine_spec(source, settings, cache_path=str(models_path().parent / "prepared"))
    engine = load_engine(spec)
    is_exact = engine.capabilities.exact
    engine.close()
    if not is_exact:
        pytest.skip("the engine does not promise it on this processor")
    _, findings = await certify(spec, PromptMaker(source.card), runs=30, seed=5, max_tokens=24)
    known = "repetition penalty"  # whose prompts the library wants to see as they are
    assert sum(finding.runs for finding in findings) >= 28
    assert [finding for finding in findings if finding.differences and not finding.name.startswith(known)] == []
