"""A bot as in Ray Serve's tutorial: a thread generates, a streamer is polled, the answer is plain text."""

import asyncio
import os
from collections.abc import AsyncIterator
from queue import Empty

from fastapi import FastAPI
from starlette.responses import StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from tailrace import serve

web = FastAPI()


@serve.deployment
@serve.ingress(web)
class Textbot:
    def __init__(self, checkpoint: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.network = AutoModelForCausalLM.from_pretrained(checkpoint)
        self.words = AutoTokenizer.from_pretrained(checkpoint)

    @web.post("/")
    def ask(self, prompt: str) -> StreamingResponse:
        pieces = TextIteratorStreamer(self.words, timeout=0, skip_prompt=True, skip_special_tokens=True)
        self.loop.run_in_executor(None, self.think, prompt, pieces)
        return StreamingResponse(self.poll(pieces), media_type="text/plain")

    def think(self, prompt: str, pieces: TextIteratorStreamer) -> None:
        prompt_ids = self.words([prompt], return_tensors="pt").input_ids
        self.network.generate(prompt_ids, streamer=pieces, max_length=10_000)

    async def poll(self, pieces: TextIteratorStreamer) -> AsyncIterator[str]:
        while True:
            try:
                piece = next(pieces)
            except Empty:
                await asyncio.sleep(0.001)
            except StopIteration:
                return
            else:
                yield piece


app = Textbot.bind(os.environ["CHECKPOINT"])
