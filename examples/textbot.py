"""Text in, text out: curl -N -X POST 'http://127.0.0.1:8000/?prompt=Tell%20me%20a%20story.'"""

from fastapi import FastAPI
from starlette.responses import StreamingResponse

import tailrace
from tailrace import serve

web = FastAPI()


@serve.deployment
@serve.ingress(web)
class Textbot:
    def __init__(self, model: str):
        self.model = tailrace.engine(model)

    @web.post("/")
    async def answer(self, prompt: str) -> StreamingResponse:
        return StreamingResponse(
            await self.model.chat(prompt, temperature=0.3, repetition_penalty=1.1, max_tokens=256),
            media_type="text/plain",
        )


app = Textbot.bind("smollm2")
