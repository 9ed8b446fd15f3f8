"""Streams of apps belong to the owner who sent the request."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tests.api.lanes import Owned
from tests.apps.one_app import client_of, one_app

from tailrace.types import new_stream_id


async def _two() -> AsyncIterator[str]:
    yield "one"
    yield "two"


async def test_streams_of_another_owner_are_unknown() -> None:
    async with one_app(_two) as hosted:
        app = Owned(hosted.front)
        mine = client_of(app, **{"x-owner": "me"})
        answer = await mine.get("/")
        assert b'{"text":"two"}' in answer.content
        stream_id = answer.headers["x-stream-id"]
        paths = (
            ("GET", ""),
            ("HEAD", ""),
            ("GET", "/events"),
            ("HEAD", "/events"),
            ("POST", "/cancel"),
            ("DELETE", ""),
        )
        for headers in ({"x-owner": "you"}, {}):
            async with client_of(app, **headers) as client:
                for method, path in paths:
                    never = await client.request(method, f"/v1/streams/{new_stream_id()}{path}")
                    found = await client.request(method, f"/v1/streams/{stream_id}{path}")
                    assert (found.status_code, found.content) == (404, never.content), (method, path)
                resumed = await client.get("/", headers={"last-event-id": f"{stream_id}-1"})
                assert resumed.status_code == 404
        resumed = await mine.get("/", headers={"last-event-id": f"{stream_id}-1"})
        assert b"two" in resumed.content
        assert b'"one"' not in resumed.content
        assert (await mine.get(f"/v1/streams/{stream_id}")).json()["status"] == "done"
        assert (await mine.delete(f"/v1/streams/{stream_id}")).status_code == 204
