"""A conversation over a WebSocket, which the model remembers as long as it lasts."""

from fastapi import FastAPI, WebSocket, WebSocketDisconnect

import tailrace
from tailrace import serve

web = FastAPI()


@serve.deployment
@serve.ingress(web)
class Chatbot:
    def __init__(self, model: str):
        self.model = tailrace.engine(model)

    @web.websocket("/")
    async def converse(self, ws: WebSocket) -> None:
        await ws.accept()
        conversation: list[dict[str, str]] = []
        try:
            async for prompt in ws.iter_text():
                conversation.append({"role": "user", "content": prompt})
                answer = ""
                async for piece in self.model.chat(
                    conversation, temperature=0.3, repetition_penalty=1.1, max_tokens=256
                ):
                    answer += piece
                    await ws.send_text(piece)
                await ws.send_text("<<Response Finished>>")
                conversation.append({"role": "assistant", "content": answer})
        except WebSocketDisconnect:
            pass


app = Chatbot.bind("smollm2")
