"""As `textbot.py`, but two prompts at a time, with a streamer for batches that blocks the event loop."""

import asyncio
import os
from collections.abc import AsyncIterator
from queue import Queue
from typing import Any

from fastapi import FastAPI
from starlette.responses import StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailrace import serve

web = FastAPI()


class Steps:
    """Takes the output of `generate`, step by step."""

    def __init__(self) -> None:
        self.queue: Queue[Any] = Queue()  # Any: tensors, and None at the end

    def put(self, value: object) -> None:
        self.queue.put(value)

    def end(self) -> None:
        self.queue.put(None)


@serve.deployment
@serve.ingress(web)
class Batchbot:
    def __init__(self, checkpoint: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.network = AutoModelForCausalLM.from_pretrained(checkpoint)
        self.words = AutoTokenizer.from_pretrained(checkpoint)
        self.words.pad_token = self.words.eos_token

    @web.post("/")
    async def ask(self, prompt: str) -> StreamingResponse:
        return StreamingResponse(self.answer(prompt), media_type="text/plain")

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=15)
    async def answer(self, prompts: list[str]) -> AsyncIterator[list[str]]:
        steps = Steps()
        self.loop.run_in_executor(None, self.think, prompts, steps)
        steps.queue.get()  # the prompts themselves
        while (step := steps.queue.get()) is not None:
            yield [self.words.decode(token, skip_special_tokens=True) for token in step]
            await asyncio.sleep(0)

    def think(self, prompts: list[str], steps: Steps) -> None:
        prompt_ids = self.words(prompts, return_tensors="pt", padding=True).input_ids
        self.network.generate(prompt_ids, streamer=steps, max_length=10_000)


app = Batchbot.bind(os.environ["CHECKPOINT"])
