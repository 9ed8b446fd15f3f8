"""Many at once: the engine's batch takes in whoever comes, at its next step, and nobody waits for a batch to fill.

Each answer is a stream with an id: read it again from any event, or stop it, at the address in its Location header.
"""

from fastapi import FastAPI
from starlette.responses import Response

import tailrace
from tailrace import serve

web = FastAPI()


@serve.deployment(max_ongoing_requests=64)
@serve.ingress(web)
class Batchbot:
    def __init__(self, model: str):
        self.model = tailrace.engine(model, max_sequences=32)

    @web.post("/")
    async def answer(self, prompt: str) -> Response:
        return serve.stream(await self.model.chat(prompt, temperature=0.3, repetition_penalty=1.1, max_tokens=256))


app = Batchbot.bind("smollm2")
