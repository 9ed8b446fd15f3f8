"""As `textbot.py`, over a WebSocket, with the conversation so far as the prompt."""

import asyncio
import os
from collections.abc import AsyncIterator
from queue import Empty

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from tailrace import serve

web = FastAPI()


@serve.deployment
@serve.ingress(web)
class Chatbot:
    def __init__(self, checkpoint: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.network = AutoModelForCausalLM.from_pretrained(checkpoint)
        self.words = AutoTokenizer.from_pretrained(checkpoint)

    @web.websocket("/")
    async def talk(self, ws: WebSocket) -> None:
        await ws.accept()
        so_far = ""
        try:
            while True:
                so_far += await ws.receive_text()
                pieces = TextIteratorStreamer(self.words, timeout=0, skip_prompt=True, skip_special_tokens=True)
                self.loop.run_in_executor(None, self.think, so_far, pieces)
                async for piece in self.poll(pieces):
                    await ws.send_text(piece)
                    so_far += piece
                await ws.send_text("<<Response Finished>>")
        except WebSocketDisconnect:
            print("The client has left.", flush=True)  # noqa: T201  # an app says what it likes

    def think(self, prompt: str, pieces: TextIteratorStreamer) -> None:
        prompt_ids = self.words([prompt], return_tensors="pt").input_ids
        self.network.generate(prompt_ids, streamer=pieces, max_length=10_000)

    async def poll(self, pieces: TextIteratorStreamer) -> AsyncIterator[str]:
        while True:
            try:
                for piece in pieces:
                    yield piece
                return
            except Empty:
                await asyncio.sleep(0.001)


app = Chatbot.bind(os.environ["CHECKPOINT"])
