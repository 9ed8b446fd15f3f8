"""A server without sockets that begins one stream, whose prompt has an image, and waits to be killed.

`python -m tests.faults.image_server DIRECTORY` writes the stream's id when the stream has some tokens.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.waiting import LONG_S

from tailrace.assembly.service import start_service
from tailrace.assembly.source import find_source
from tailrace.models.progress import NoProgress
from tailrace.settings import Settings
from tailrace.streams import Reader
from tailrace.types import Attachment, GenerateRequest, Sampling, Segment

__all__ = ["COUNT", "IMAGE", "PROMPT", "SEED"]

IMAGE = Attachment.of(b"\x89PNG", "image/png", 40)
PROMPT: tuple[Segment, ...] = (tuple(b"What is in "), IMAGE, tuple(b"?"))
COUNT, SEED = 60, 3
_SEEN = 8  # events


async def _main(directory: Path) -> None:
    source = await asyncio.to_thread(find_source, "scripted:tokens_per_s=50", NoProgress())
    request = GenerateRequest(
        prompts=(PROMPT,), sampling=Sampling(max_tokens=COUNT, seed=SEED), on_disconnect="detach", linger_s=LONG_S
    )
    async with start_service(source, Settings(), data_path=directory) as service:
        run = await service.generator.create(request)
        with Reader(run.log) as reader:
            while len(run.log.events) < _SEEN:
                await reader.wait()
                reader.take()
            sys.stdout.write(f"{run.log.stream_id}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
