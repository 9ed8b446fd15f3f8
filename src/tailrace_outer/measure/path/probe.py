"""Measures a path to a server with a durable stream, which needs no model.

The probe appends numbered messages at known times, and reads the same stream through the same path. So it knows how
late each one came, whatever the speed of an engine. The stream expires by itself.
"""

from __future__ import annotations

import itertools
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx

__all__ = ["ANSWER_S", "Found", "PathFailed", "Problem", "measure_path"]

# What can be wrong; `settings` says what to change.
Problem = Literal[
    "buffering", "compression", "idle", "silence", "body", "keep_alive", "websocket", "origin", "last_event_id"
]  # fmt: skip

_MESSAGES = 12
_PACE_S = 0.25
_HELD_S = 2.2 * _PACE_S  # a message that came later waited for other messages
_MAY_BE_HELD = _MESSAGES // 4  # a busy machine delays some
ANSWER_S = 30.0  # for a connection or an answer, unless the request waits on purpose
_TTL_S = 300
_BODY_BYTES = 1_500_000  # below the default of --body-bytes, above nginx's of 1 MiB
_KEEP_IDLE_S = 8.0
_BROKEN = (502, 503, 504)


class PathFailed(Exception):
    """The path cannot be measured. The message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """One thing that was measured."""

    name: str
    text: str
    problem: Problem | None = None  # None: as it should be, or only information


@dataclass(slots=True)
class _Path:
    """The address, and what is known of it."""

    url: str
    client: httpx.Client
    certificates: ssl.SSLContext  # that are trusted
    headers: dict[str, str]
    stream: str  # path of the durable stream

    def append(self, message: object) -> httpx.Response:
        return self.client.post(f"{self.url}{self.stream}", json=[message], headers=self.headers)


@dataclass(slots=True)
class _Reader:
    """Follows the stream in a thread."""

    path: _Path
    arrived: dict[int, float] = field(default_factory=dict)  # seconds, by message
    bytes_at: list[float] = field(default_factory=list)  # times at which any bytes arrived
    headers: dict[str, str] = field(default_factory=dict)
    ended_s: float = 0.0  # 0: not yet
    how: str = ""  # it ended
    began: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        import httpx

        headers = self.path.headers | {"accept": "text/event-stream", "accept-encoding": "gzip, br, zstd"}
        events = f"{self.path.url}{self.path.stream}?offset=-1&live=sse"
        try:
            with self.path.client.stream("GET", events, headers=headers, timeout=_waiting()) as answer:
                if answer.status_code != 200:
                    self.how = f"got status {answer.status_code}"
                    if answer.status_code == 403:
                        answer.read()
                        self.how += f": {_message(answer) or 'something before the server forbids it'}"
                    return
                self.headers = dict(answer.headers)
                self.began.set()
                for line in answer.iter_lines():
                    now = time.monotonic()
                    self.bytes_at.append(now)
                    for number in _numbers(line):
                        self.arrived.setdefault(number, now)
                    if self.stop.is_set():
                        return
            self.how = "ended"
        except httpx.HTTPError as error:
            self.how = f"broke ({type(error).__name__})"
        finally:
            self.ended_s = time.monotonic()
            self.began.set()


def _waiting() -> httpx.Timeout:
    """Return the timeout of a request that waits on purpose."""
    import httpx

    return httpx.Timeout(ANSWER_S, read=None)


def _numbers(line: str) -> Iterator[int]:
    """Yield the numbers of the messages in a line of the event stream."""
    if not line.startswith("data:["):
        return
    with suppress(ValueError, TypeError, KeyError):
        for message in json.loads(line.removeprefix("data:")):
            yield int(message["n"])


def measure_path(
    url: str, key: str = "", *, idle_s: float = 25.0, report: Callable[[str], None] = lambda _: None
) -> list[Found]:
    """Measure a path for about `idle_s` seconds and ten more. `report` gets what is being measured. `idle_s` 0 skips
    what has to wait. With more than 50 s, the server itself ends the idle stream.

    Raises: PathFailed.
    """
    with _opened(url, key) as path:
        found = [*_about(path), *_origin(path), *_resumes(path), *_websocket(path)]
        report("Reading a stream while it is written")
        reader, found_live = _live(path)
        found += found_live
        try:
            if idle_s:
                report(f"Waiting {idle_s:.0f} s while nothing is written")
                found += _idle(path, reader, idle_s)
        finally:
            reader.stop.set()
            with suppress(Exception):
                path.append({"n": -1})  # wakes the reader
        return [*found, *_large_body(path)]


@contextmanager
def _opened(url: str, key: str) -> Iterator[_Path]:
    """Create the stream. Raises: PathFailed."""
    import httpx

    from tailrace_outer.client.certificates import NOT_TRUSTED, is_not_trusted, trusted_certificates

    try:
        parts, _ = urlsplit(url), httpx.URL(url)  # each refuses something
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        is_address = False
    if not is_address:
        raise PathFailed("Give the address of a server: http://host:port, or https.")
    base = parts.geturl().rstrip("/").removesuffix("/v1")
    host = _host(base)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        certificates = trusted_certificates()
    except ValueError as error:
        raise PathFailed(str(error)) from None
    with httpx.Client(timeout=ANSWER_S, trust_env=False, verify=certificates) as client:
        path = _Path(base, client, certificates, headers, f"/v1/durable/doctor-{secrets.token_hex(8)}")
        try:
            answer = client.put(
                f"{base}{path.stream}",
                headers=headers | {"content-type": "application/json", "stream-ttl": str(_TTL_S)},
            )
        except httpx.HTTPError as error:
            why = NOT_TRUSTED if is_not_trusted(error) else f"cannot be reached ({type(error).__name__})"
            raise PathFailed(f"{host} {why}.") from None
        if answer.status_code == 403 and "Host header" in answer.text:
            raise PathFailed(
                f"The server behind {host} refuses the Host that it gets. Let the path keep Host as it was "
                "sent, or name it: tailrace serve --allowed-hosts NAME."
            )
        if answer.status_code == 401:
            raise PathFailed(f"{host} needs a key that is valid (status 401): --key or TAILRACE_KEY.")
        if answer.status_code == 403:
            why = _message(answer) or "Something before the server does this, such as a firewall."
            raise PathFailed(f"{host} forbids a PUT request (status 403). {why}")
        if answer.status_code in _BROKEN:
            raise PathFailed(f"{host} is reached, but not the server behind it (status {answer.status_code}).")
        if answer.status_code != 201 or "stream-next-offset" not in answer.headers:
            raise PathFailed(
                f"{host} does not answer as a tailrace server with durable streams (status "
                f"{answer.status_code}; --durable-bytes 0 switches them off)."
            )
        try:
            yield path
        except httpx.HTTPError as error:
            asked = f"{error.request.method} {error.request.url.path}"
            raise PathFailed(f"{host} broke {asked} ({type(error).__name__}).") from None
        finally:
            with suppress(httpx.HTTPError):
                client.delete(f"{base}{path.stream}", headers=headers)


def _host(url: str) -> str:
    """Return host and port as a browser sends them in Host and Origin: without a default port, user and password."""
    import httpx

    return httpx.URL(url).netloc.decode()


def _message(answer: httpx.Response) -> str:
    """Return what a tailrace server says is wrong; "" if something else has answered."""
    with suppress(ValueError, TypeError, KeyError):
        return str(answer.json()["error"]["message"])
    return ""


def _about(path: _Path) -> Iterator[Found]:
    """What answers, and which versions of HTTP are offered."""
    answer = path.client.get(f"{path.url}/livez", headers=path.headers)
    names = [answer.headers[name] for name in ("server", "via") if name in answer.headers]
    yield Found("between", ", ".join(names)[:200] or "nothing that names itself")
    offered = _alpn(path.url) if path.url.startswith("https") else ""
    more = f"; TLS offers {offered}" if offered else ""
    later = "; HTTP/3 is offered" if "h3" in answer.headers.get("alt-svc", "") else ""
    limit = "" if offered == "h2" else ", so a browser opens six streams of one server at most"
    yield Found("HTTP", f"{answer.http_version}{more}{later}{limit}")


def _alpn(url: str) -> str:
    """Return the protocol that TLS chooses of HTTP/2 and HTTP/1.1, "" if none. The certificate is not checked."""
    import socket

    parts = urlsplit(url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with suppress(OSError):
        address = (parts.hostname or "", parts.port or 443)
        with (
            socket.create_connection(address, ANSWER_S) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname) as tls,
        ):
            return tls.selected_alpn_protocol() or ""
    return ""


def _origin(path: _Path) -> Iterator[Found]:
    """A page of this address asks the server: it compares Origin and Host, which the path has to keep."""
    origin = {"origin": f"{urlsplit(path.url).scheme}://{_host(path.url)}"}
    answer = path.client.get(f"{path.url}/v1/models", headers=path.headers | origin)
    if answer.status_code == 403:
        plain = path.client.get(f"{path.url}/v1/models", headers=path.headers)
        if plain.status_code == 403:
            why = _message(plain) or "something before the server forbids /v1/models"
            yield Found("page", f"not known, since the same request is refused without an Origin: {why}")
            return
        yield Found("page", "requests of a page at this address are refused: Host does not arrive as sent", "origin")
    else:
        yield Found("page", "Host arrives as it was sent")


def _live(path: _Path) -> tuple[_Reader, list[Found]]:
    """Write messages, and read them at the same time. Raises: PathFailed, httpx.HTTPError."""
    reader = _Reader(path)
    threading.Thread(target=reader.run, daemon=True).start()
    reader.began.wait(1.0)
    sent = {}
    for number in range(_MESSAGES):
        if reader.ended_s:
            break
        sent[number] = time.monotonic()
        answer = path.append({"n": number})
        if answer.is_error:
            raise PathFailed(f"A stream cannot be written: a message got status {answer.status_code}.")
        time.sleep(_PACE_S)
    time.sleep(4 * _PACE_S)
    if reader.ended_s and len(reader.arrived) < _MESSAGES:
        raise PathFailed(f"A stream cannot be read while it is written: the reader {reader.how}.")
    late = [reader.arrived.get(number, time.monotonic()) - at for number, at in sent.items()]
    held = sum(delay > _HELD_S for delay in late)
    usual = sorted(late)[len(late) // 2]
    found = []
    if held > _MAY_BE_HELD:
        text = f"{held} of {_MESSAGES} messages are held back until others come, by up to {max(late):.1f} s"
        found.append(Found("streaming", text, "buffering"))
    else:
        found.append(Found("streaming", f"messages arrive one by one, {usual * 1000:.0f} ms after they were written"))
    coding = reader.headers.get("content-encoding", "")
    if coding:
        found.append(
            Found("compression", f"streams are compressed ({coding}), which holds back their parts", "compression")
        )
    else:
        found.append(Found("compression", "streams are not compressed"))
    return reader, found


def _resumes(path: _Path) -> Iterator[Found]:
    """Read a stream of a model in two connections, as `EventSource` does. Uses a few tokens."""
    import httpx

    body = {"prompt": "A river is", "max_tokens": 8, "temperature": 0}
    accept = path.headers | {"accept": "text/event-stream"}
    try:
        first: list[str] = []
        with path.client.stream("POST", f"{path.url}/v1/streams", json=body, headers=accept) as answer:
            if answer.status_code != 200:
                answer.read()
                yield Found("resume", f"not tried: the server answers {answer.status_code} to a request for a stream")
                return
            stream_id = answer.headers.get("x-stream-id", "")
            for line in answer.iter_lines():
                first += [line[4:]] if line.startswith("id: ") else []
                if len(first) == 2:
                    break
        last = {"last-event-id": first[-1]}
        events = f"{path.url}/v1/streams/{stream_id}/events"
        with path.client.stream("GET", events, headers=accept | last) as answer:
            if answer.status_code != 200:
                yield Found("resume", f"not tried: the server answers {answer.status_code} to a reader of the stream")
                return
            again = [line[4:] for line in answer.iter_lines() if line.startswith("id: ")]
    except (httpx.HTTPError, IndexError) as error:
        yield Found("resume", f"not tried: the stream of a model broke ({type(error).__name__})")
        return
    if not again or first[-1] in again:
        yield Found("resume", "a stream begins again from its start: Last-Event-ID does not arrive", "last_event_id")
    else:
        yield Found("resume", "a stream goes on after the last event that was read")


def _large_body(path: _Path) -> Iterator[Found]:
    import httpx

    try:
        answer = path.append({"n": -1, "text": "x" * _BODY_BYTES})
    except httpx.HTTPError as error:
        yield Found("bodies", f"a request of 1.5 MB broke ({type(error).__name__})", "body")
        return
    if answer.status_code == 413 and not answer.headers.get("content-type", "").startswith("application/json"):
        yield Found("bodies", "a request of 1.5 MB is refused on its way (413)", "body")
    elif answer.status_code == 413:
        yield Found("bodies", "the server itself refuses 1.5 MB (--body-bytes)")
    elif answer.is_error:
        yield Found("bodies", f"a request of 1.5 MB gets {answer.status_code}", "body")
    else:
        yield Found("bodies", "a request of 1.5 MB arrives")


def _websocket(path: _Path) -> Iterator[Found]:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    address = f"ws{path.url.removeprefix('http')}/v1/ws"
    try:
        with connect(
            address,
            additional_headers=path.headers,
            open_timeout=ANSWER_S,
            proxy=None,
            ssl=path.certificates if address.startswith("wss") else None,
        ):
            yield Found("WebSocket", "opens")
    except (OSError, WebSocketException) as error:
        yield Found("WebSocket", f"does not open ({type(error).__name__})", "websocket")


def _idle(path: _Path, reader: _Reader, idle_s: float) -> Iterator[Found]:
    """Three waits at once: a stream without messages, a request that is not answered, and an unused connection."""
    began = time.monotonic()
    silent: list[Found] = []
    kept: list[Found] = []
    waits = [
        threading.Thread(target=_silent_request, args=(path, silent), daemon=True),
        threading.Thread(target=_kept_connection, args=(path, kept), daemon=True),
    ]
    for wait in waits:
        wait.start()
    while time.monotonic() - began < idle_s and not reader.ended_s:
        time.sleep(0.1)
    end = reader.ended_s or time.monotonic()
    at = [began, *(moment for moment in reader.bytes_at if moment > began), end]
    gap = max(later - earlier for earlier, later in itertools.pairwise(at))
    if reader.ended_s:
        yield Found("idle", f"a stream without text {reader.how} after {end - began:.0f} s", "idle")
    else:
        yield Found("idle", f"a stream without text stays open; something arrived at least every {gap:.0f} s")
    waits[0].join(max(0.1, idle_s + 10 - (time.monotonic() - began)))
    waits[1].join()  # each of its requests has a timeout
    yield from silent or [Found("silence", f"a request stayed without an answer for {time.monotonic() - began:.0f} s")]
    yield from kept


def _silent_request(path: _Path, found: list[Found]) -> None:
    """A long poll, which the server answers after --durable-poll-s."""
    import httpx

    began = time.monotonic()
    try:
        poll = f"{path.url}{path.stream}?offset=now&live=long-poll"
        status = path.client.get(poll, headers=path.headers, timeout=_waiting()).status_code
        how = "" if status in (200, 204) else f"got {status}"
    except httpx.HTTPError as error:
        how = f"broke ({type(error).__name__})"
    after = f"after {time.monotonic() - began:.0f} s"
    if how:
        found.append(Found("silence", f"a silent request {how} {after}", "silence"))
    else:
        found.append(Found("silence", f"a request that is answered {after} gets its answer"))


def _kept_connection(path: _Path, found: list[Found]) -> None:
    """Ask, wait, and ask again on the same connection: a POST, which no proxy repeats by itself. It goes to a stream
    that does not exist, since an append would end the silent request."""
    import httpx

    limits = httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_IDLE_S * 10)
    how = ""
    with httpx.Client(timeout=ANSWER_S, trust_env=False, verify=path.certificates, limits=limits) as client:
        target = f"{path.url}{path.stream}-none"
        try:
            for pause_s in (_KEEP_IDLE_S, 1.0, 0.0):
                answer = client.post(target, json=[{"n": -1}], headers=path.headers)
                if answer.status_code in _BROKEN:
                    how = f"got {answer.status_code}"
                    break
                time.sleep(pause_s)
        except httpx.HTTPError as error:
            how = f"broke ({type(error).__name__})"
    if how:
        found.append(Found("connections", f"a request on a connection after a pause {how}", "keep_alive"))
    else:
        text = f"a connection that was unused for {_KEEP_IDLE_S:.0f} s takes another request"
        found.append(Found("connections", text))
