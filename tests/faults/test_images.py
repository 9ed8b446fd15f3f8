"""A stream whose prompt has an image survives its server: its record has the image's digest."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

from tests.api.oracle import Answer
from tests.api.process import Server, environment
from tests.faults.image_server import COUNT, IMAGE, PROMPT, SEED
from tests.faults.laws import Seen, check, read_journal

from tailrace.engines.scripted.engine import read_ids
from tailrace.streams import open_sqlite
from tailrace.types import Record

_ROOT = Path(__file__).parents[2]


async def _record(directory: Path) -> Record:
    """Return the record of the only stream that has not ended, as a server after the death finds it."""
    async with open_sqlite(directory) as store:
        (lease,) = await store.take_over()
        return lease.log.record


def test_a_stream_with_an_image_survives_its_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.image_server", str(tmp_path)]
    with subprocess.Popen(command, cwd=_ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            stream_id = process.stdout.readline().strip()
        finally:
            process.kill()
    record = asyncio.run(_record(tmp_path))
    assert (record.stream_id, record.prompts[0].segments) == (stream_id, PROMPT)
    assert IMAGE in record.prompts[0].segments
    answer = Answer(read_ids(PROMPT), COUNT, SEED)
    assert record.num_prompt_tokens == len(answer.prompt_ids)
    with contextlib.closing(Server("scripted:tokens_per_s=200", "--data-dir", str(tmp_path))) as server:
        server.wait_ready()
        content = server.http.get(f"/v1/streams/{stream_id}/events").content
    events = [event + b"\n\n" for event in content.split(b"\n\n") if event]
    check(stream_id, answer, [Seen(events)], read_journal(tmp_path))
