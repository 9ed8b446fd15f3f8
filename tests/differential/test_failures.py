"""With every client a failure is an exception, and never a short answer that looks complete."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest
from tests.api.process import Server
from tests.differential.all_drivers import DRIVERS
from tests.differential.drivers import ClientError, Driver, params
from tests.differential.proxy import Cut, Proxy

from tailrace_outer.scripted.scripted_engine import TEXTS

# fails: the engine gives up after three tokens. cut: the connection breaks off, unless the client resumes then.
# Before the first byte: too long (400, 422; Codex looks for it in the stream), full (429), draining (503, and 429 on
# TGI's wire, whose clients know it).
_TABLE = """
client                                | fails                 | cut                   | too long              | full                  | draining
hub text                              | GenerationError       | RemoteProtocolError   | ValidationError       | OverloadedError       | OverloadedError
hub text stream                       | GenerationError       | RemoteProtocolError   | ValidationError       | OverloadedError       | OverloadedError
hub details stream                    | GenerationError       | RemoteProtocolError   | ValidationError       | OverloadedError       | OverloadedError
hub generated_text                    | GenerationError       | RemoteProtocolError   | ValidationError       | OverloadedError       | OverloadedError
hub async text                        | GenerationError       | RemoteProtocolError   | ValidationError       | OverloadedError       | OverloadedError
hub async details stream              | GenerationError       | RemoteProtocolError   | ValidationError       | OverloadedError       | OverloadedError
hub chat                              | HfHubHTTPError        | RemoteProtocolError   | BadRequestError       | HfHubHTTPError        | HfHubHTTPError
hub chat stream                       | GenerationError       | RemoteProtocolError   | BadRequestError       | HfHubHTTPError        | HfHubHTTPError
hub async chat stream                 | GenerationError       | RemoteProtocolError   | BadRequestError       | HfHubHTTPError        | HfHubHTTPError
requests lines of /generate_stream    | StreamFailed          | ChunkedEncodingError  | HTTPError             | HTTPError             | HTTPError
openai chat                           | InternalServerError   | APIConnectionError    | BadRequestError       | RateLimitError        | InternalServerError
openai chat stream                    | APIError              | APIConnectionError    | BadRequestError       | RateLimitError        | InternalServerError
openai chat helper                    | APIError              | APIConnectionError    | BadRequestError       | RateLimitError        | InternalServerError
openai completion                     | InternalServerError   | APIConnectionError    | BadRequestError       | RateLimitError        | InternalServerError
openai completion stream              | APIError              | APIConnectionError    | BadRequestError       | RateLimitError        | InternalServerError
openai async chat stream              | APIError              | APIConnectionError    | BadRequestError       | RateLimitError        | InternalServerError
openai async completion stream        | APIError              | APIConnectionError    | BadRequestError       | RateLimitError        | InternalServerError
openai response                       | InternalServerError   | APIConnectionError    | BadRequestError       | RateLimitError        | InternalServerError
openai response stream                | APIError              | APIConnectionError    | APIError              | RateLimitError        | InternalServerError
openai response helper                | APIError              | APIConnectionError    | APIError              | RateLimitError        | InternalServerError
openai response, resuming             | APIError              |                       | BadRequestError       | RateLimitError        | InternalServerError
anthropic                             | InternalServerError   | APIConnectionError    | BadRequestError       | RateLimitError        | ServiceUnavailableError
anthropic stream                      | APIStatusError        | RemoteProtocolError   | BadRequestError       | RateLimitError        | ServiceUnavailableError
anthropic async stream                | APIStatusError        | RemoteProtocolError   | BadRequestError       | RateLimitError        | ServiceUnavailableError
ollama chat                           | ResponseError         | RemoteProtocolError   | ResponseError         | ResponseError         | ResponseError
ollama chat stream                    | ResponseError         | RemoteProtocolError   | ResponseError         | ResponseError         | ResponseError
ollama generate stream                | ResponseError         | RemoteProtocolError   | ResponseError         | ResponseError         | ResponseError
ollama async chat stream              | ResponseError         | RemoteProtocolError   | ResponseError         | ResponseError         | ResponseError
httpx-sse chat stream                 | StreamFailed          | RemoteProtocolError   | SSEError              | SSEError              | SSEError
our own reader                        | StreamFailed          | EOFError              | StreamFailed          | StreamFailed          | StreamFailed
the state of a stream                 | StreamFailed          | RemoteProtocolError   | HTTPStatusError       | HTTPStatusError       | HTTPStatusError
httpx-sse                             | StreamFailed          | RemoteProtocolError   | SSEError              | SSEError              | SSEError
httpx-sse async                       | StreamFailed          | RemoteProtocolError   | SSEError              | SSEError              | SSEError
httpx-sse, resuming                   | StreamFailed          |                       | HTTPStatusError       | HTTPStatusError       | HTTPStatusError
httpx-sse, posting again              | StreamFailed          |                       | HTTPStatusError       | HTTPStatusError       | HTTPStatusError
httpx lines                           | StreamFailed          | RemoteProtocolError   | HTTPStatusError       | HTTPStatusError       | HTTPStatusError
sseclient-py                          | StreamFailed          | ChunkedEncodingError  | HTTPError             | HTTPError             | HTTPError
requests lines                        | StreamFailed          | ChunkedEncodingError  | HTTPError             | HTTPError             | HTTPError
aiohttp lines                         | StreamFailed          | ClientPayloadError    | ClientResponseError   | ClientResponseError   | ClientResponseError
requests as in the Ray tutorial       | ChunkedEncodingError  | ChunkedEncodingError  | HTTPError             | HTTPError             | HTTPError
requests in one piece                 | ChunkedEncodingError  | ChunkedEncodingError  | HTTPError             | HTTPError             | HTTPError
httpx text                            | RemoteProtocolError   | RemoteProtocolError   | HTTPStatusError       | HTTPStatusError       | HTTPStatusError
aiohttp bytes                         | ClientPayloadError    | ClientPayloadError    | ClientResponseError   | ClientResponseError   | ClientResponseError
curl -N                               | exit 18               | exit 18               | exit 22               | exit 22               | exit 22
requests as in the FastAPI article    | ChunkedEncodingError  | ChunkedEncodingError  | HTTPError             | HTTPError             | HTTPError
httpx-sse, text so far                | StreamFailed          | RemoteProtocolError   | SSEError              | SSEError              | SSEError
httpx of Triton                       | HTTPStatusError       | RemoteProtocolError   | HTTPStatusError       | HTTPStatusError       | HTTPStatusError
httpx-sse of Triton                   | StreamFailed          | RemoteProtocolError   | SSEError              | SSEError              | SSEError
websockets as in the Ray tutorial     | ConnectionClosedError | ConnectionClosedError | ConnectionClosedError | ConnectionClosedError | InvalidStatus
websockets                            | StreamFailed          | ConnectionClosedError | StreamFailed          | StreamFailed          | InvalidStatus
websockets async                      | StreamFailed          | ConnectionClosedError | StreamFailed          | StreamFailed          | InvalidStatus
js openai chat                        | InternalServerError   | TypeError             | BadRequestError       | RateLimitError        | InternalServerError
js openai chat stream                 | APIError              | TypeError             | BadRequestError       | RateLimitError        | InternalServerError
js openai chat helper                 | APIError              | OpenAIError           | BadRequestError       | RateLimitError        | InternalServerError
js openai completion stream           | APIError              | TypeError             | BadRequestError       | RateLimitError        | InternalServerError
js openai response stream             | APIError              | TypeError             | APIError              | RateLimitError        | InternalServerError
js anthropic stream                   | APIError              | AnthropicError        | BadRequestError       | RateLimitError        | ServiceUnavailableError
js ollama chat stream                 | Error                 | TypeError             | ResponseError         | ResponseError         | ResponseError
js ai sdk                             | Error                 | TypeError             | Error                 | Error                 | Error
js websocket                          | StreamError           | Error                 | StreamError           | StreamError           | Error
js eventsource, text so far           | StreamError           |                       | Error                 | Error                 | Error
js hub chat                           | ProviderApiError      | TypeError             | ProviderApiError      | ProviderApiError      | ProviderApiError
js hub chat stream                    | ProviderApiError      | TypeError             | ProviderApiError      | ProviderApiError      | ProviderApiError
js hub text                           | ProviderApiError      | TypeError             | ProviderApiError      | ProviderApiError      | ProviderApiError
js hub text stream                    | ProviderApiError      | TypeError             | ProviderApiError      | ProviderApiError      | ProviderApiError
js eventsource-parser chat stream     | StreamError           | TypeError             | Error                 | Error                 | Error
js hub 4.13.16 text                   | ProviderApiError      | TypeError             | ProviderApiError      | ProviderApiError      | ProviderApiError
js hub 4.13.16 text stream            | ProviderApiError      | TypeError             | ProviderApiError      | ProviderApiError      | ProviderApiError
js hub 4.13.16 generated_text         | ProviderApiError      | TypeError             | ProviderApiError      | ProviderApiError      | ProviderApiError
js hub 2.5.0 as documented            | Error                 | TypeError             | Error                 | Error                 | Error
js eventsource                        | StreamError           |                       | Error                 | Error                 | Error
js fetch-event-source                 | StreamError           |                       | Fatal                 | Fatal                 | Fatal
js eventsource-parser                 | StreamError           | TypeError             | Error                 | Error                 | Error
js fetch text                         | TypeError             | TypeError             | Error                 | Error                 | Error
js fetch pieces                       | TypeError             | TypeError             | Error                 | Error                 | Error
text-generation generate              | GenerationError       | ChunkedEncodingError  | ValidationError       | OverloadedError       | OverloadedError
text-generation generate_stream       | GenerationError       | ChunkedEncodingError  | ValidationError       | OverloadedError       | OverloadedError
text-generation async generate        | GenerationError       | ClientPayloadError    | ValidationError       | OverloadedError       | OverloadedError
text-generation async generate_stream | GenerationError       | ClientPayloadError    | ValidationError       | OverloadedError       | OverloadedError
"""  # noqa: E501 - one row a client
_HEAD, *_ROWS = ([cell.strip() for cell in line.split("|")] for line in _TABLE.strip().splitlines())
RAISES = {row[0]: dict(zip(_HEAD[1:], row[1:], strict=True)) for row in _ROWS}

PROMPT = f"Recite {list(TEXTS).index('JSON')}."
FAILS = f"Recite {len(TEXTS) + 2}."  # the third of the engine's faults


def check(driver: Driver, cause: str, url: str, prompt: str = PROMPT) -> None:
    (outcome,) = driver.read_all(url, [prompt])
    assert isinstance(outcome, Exception), f"{cause}, and yet: {outcome!r}"
    name = outcome.name if isinstance(outcome, ClientError) else type(outcome).__name__
    assert name == RAISES[driver.name][cause], str(outcome)


@pytest.fixture(scope="module")
def breaking(reciting: Server) -> Iterator[Proxy]:
    with Proxy(reciting.port, Cut(0, (25,))) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    with contextlib.closing(Server("scripted", "--context-tokens", "8")) as server:
        yield server.wait_ready()


_ONE_AT_A_TIME = ("--max-concurrent-requests", "1", "--queue-s", "1")  # the chatbot's socket waits so long for a place


@pytest.fixture(scope="module")
def full() -> Iterator[Server]:
    with contextlib.closing(Server("scripted:tokens_per_s=20", *_ONE_AT_A_TIME)) as server:
        server.wait_ready().create({"prompt": "Long.", "max_tokens": 10_000, "linger_s": 600})
        yield server


@pytest.fixture(scope="module")
def draining() -> Iterator[Server]:
    with contextlib.closing(Server("scripted:tokens_per_s=20", "--drain-s", "600")) as server:
        stream_id = server.wait_ready().create({"prompt": "Long.", "max_tokens": 20_000, "linger_s": 600})
        server.send_signal(signal.SIGTERM)
        server.wait_line("Stopping")
        yield server
        server.http.delete(f"/v1/streams/{stream_id}")


def test_every_client_is_tested() -> None:
    assert set(RAISES) == set(DRIVERS)


@pytest.mark.parametrize("driver", params(DRIVERS.values()))
def test_the_engine_fails_in_the_middle(driver: Driver, reciting: Server) -> None:
    check(driver, "fails", reciting.url, FAILS)


@pytest.mark.parametrize("driver", params(driver for driver in DRIVERS.values() if not driver.resumes))
def test_the_connection_is_cut(driver: Driver, breaking: Proxy) -> None:
    check(driver, "cut", breaking.url)


@pytest.mark.deep
@pytest.mark.parametrize("driver", params(DRIVERS.values()))
def test_a_prompt_that_is_too_long(driver: Driver, narrow: Server) -> None:
    check(driver, "too long", narrow.url)


@pytest.mark.deep
@pytest.mark.parametrize("driver", params(DRIVERS.values()))
def test_a_server_that_is_full(driver: Driver, full: Server) -> None:
    check(driver, "full", full.url)


@pytest.mark.deep
@pytest.mark.parametrize("driver", params(DRIVERS.values()))
def test_a_server_that_stops(driver: Driver, draining: Server) -> None:
    check(driver, "draining", draining.url)
