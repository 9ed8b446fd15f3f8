"""A part of the server asks for the stream of an Idempotency-Key, and begins none."""

from __future__ import annotations

import json
from pathlib import Path

from tests.api.keyed import serving_with_keys

from tailrace.server import Sender, StreamLog
from tailrace.types import ANONYMOUS


async def test_only_a_stream_that_has_begun_answers(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        server = house.server()
        house.build_app(server=server)
        logs: list[StreamLog] = []

        async def ask(text: str = "Hi.", *, found_only: bool, key: str = "one") -> tuple[int, bytes]:
            body = json.dumps({"input": text, "max_output_tokens": 3, "stream": True, "store": False}).encode()
            headers = {"idempotency-key": key} if key else {}
            async with server.begin(
                Sender(ANONYMOUS), "/v1/responses", body, headers=headers, logs=logs, found_only=found_only
            ) as answer:
                return answer.status, b"".join([part async for part in answer.parts])

        status, refused = await ask(found_only=True)
        assert (status, json.loads(refused)["error"]["code"]) == (404, "unknown_stream")
        assert not logs
        status, events = await ask(found_only=False)
        assert status == 200
        assert await ask(found_only=True) == (200, events)
        assert len({log.stream_id for log in logs}) == 1
        for more, expected in (({"text": "Ho."}, 409), ({"key": "two"}, 404), ({"key": ""}, 404)):
            assert (await ask(**more, found_only=True))[0] == expected
        assert not house.service.num_live
