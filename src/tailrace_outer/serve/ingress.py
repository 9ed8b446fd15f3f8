"""HTTP for deployments: the user's ASGI app, whose routes may be methods of the deployment's class."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from types import FunctionType, MethodType
from typing import Any, cast

from starlette.types import ASGIApp

from tailrace.errors import TailraceError
from tailrace_outer.serve.calling import call
from tailrace_outer.serve.exceptions import BackPressureError, DeploymentUnavailableError
from tailrace_outer.serve.failures import refusal_of

__all__ = ["asgi_of", "has_ingress", "ingress", "is_asgi"]

_MARK = "__tailrace_ingress__"


class _Built:
    """Marks a class that builds its ASGI app in `__serve_build_asgi_app__`."""


def ingress(
    app: ASGIApp | Callable[[], ASGIApp] | Callable[[], Awaitable[ASGIApp]] | None = None,
) -> Callable[..., type[Any]]:
    """Serve a deployment's class through an ASGI app. The app may be FastAPI with routes on the class's methods, or a
    function that builds the app in each process. Used without a class, it makes one. Place it below
    `@serve.deployment`.

    Raises: TypeError if `app` is not an app, or if the class has a `__call__`.
    """
    if app is not None and not callable(app):
        raise TypeError("serve.ingress takes an ASGI app, or a function that returns one.")

    def decorate(body: type[Any] | None = None) -> type[Any]:  # Any: the user's
        if body is None:
            body = type("ASGIIngress", (), {})
        if not inspect.isclass(body):
            raise TypeError("serve.ingress decorates a class. Place it below @serve.deployment.")
        if "__call__" in vars(body):
            raise TypeError(
                f"{body.__name__} has both a __call__ and an ingress. Only one of them can answer requests."
            )
        setattr(body, _MARK, app if app is not None else _Built())
        return body

    return decorate


def has_ingress(body: type[Any]) -> bool:  # Any: the user's
    """Return whether the class is decorated with `ingress`."""
    return hasattr(body, _MARK)


def is_asgi(app: object) -> bool:
    """Return whether an object can be called with scope, receive and send."""
    if not callable(app) or inspect.isclass(app):
        return False
    function = app if inspect.isroutine(app) else type(app).__call__
    try:
        inspect.signature(function).bind(*([None] * (3 if inspect.isroutine(app) else 4)))
    except (TypeError, ValueError):
        return False
    return inspect.iscoroutinefunction(function) or not inspect.isroutine(app)


async def asgi_of(instance: Any) -> ASGIApp:  # Any: the user's
    """Return the ASGI app of a constructed deployment or of a function."""
    app = getattr(type(instance), _MARK, None)
    if app is None:
        return _request_app(instance)
    if isinstance(app, _Built):
        app = instance.__serve_build_asgi_app__()
        app = await app if inspect.isawaitable(app) else app
        return cast(ASGIApp, app)
    if not is_asgi(app):
        app = app()
        if isinstance(app, Awaitable):
            app = await app
    if not is_asgi(app):
        raise TypeError("The function given to serve.ingress did not return an ASGI app.")
    _bind_routes(app, instance)
    _answer_refusals(app)
    return cast(ASGIApp, app)


def _answer_refusals(app: Any) -> None:  # Any: Starlette's, FastAPI's, or whatever
    """Add exception handlers to the app: errors of called deployments and models keep their status, other exceptions
    get the front's general message. The app's own handlers stay."""
    add = getattr(app, "add_exception_handler", None)
    if add is None:
        return
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    def refuse(request: Request, error: Exception) -> JSONResponse:
        status, message, retry_after_s, code, param = refusal_of(error)
        body = {"message": message, "type": "server_error", "code": code, "param": param}
        if status < 500:
            body["type"] = "rate_limit_error" if status == 429 else "invalid_request_error"
        retry_after_s = retry_after_s or (1.0 if status in (429, 503) else None)
        headers = {"retry-after": str(math.ceil(retry_after_s))} if retry_after_s else None
        return JSONResponse({"error": body}, status, headers)

    own = getattr(app, "exception_handlers", {})
    for kind in (BackPressureError, DeploymentUnavailableError, TailraceError):
        if kind not in own:
            add(kind, refuse)
    if Exception not in own and 500 not in own:
        add(Exception, refuse)


def _bind_routes(app: Any, instance: object) -> None:  # Any: Starlette's, FastAPI's, or whatever
    """Bind routes that are methods of the deployment's class to `instance`, and drop routes of other classes."""
    router = getattr(app, "router", app)
    routes = getattr(router, "routes", None)
    if not isinstance(routes, list):
        return
    ours = {cls.__qualname__ for cls in type(instance).__mro__}
    kept = []
    for route in routes:
        endpoint = getattr(route, "endpoint", None)
        owner = _owner(endpoint)
        if owner is None:
            included = getattr(route, "original_router", None)  # newer versions of FastAPI nest included routers
            if included is not None:
                _bind_routes(included, instance)
            kept.append(route)
        elif owner in ours:
            kept.append(_with_endpoint(route, MethodType(cast(FunctionType, endpoint), instance)))
    routes[:] = kept


def _owner(endpoint: object) -> str | None:
    """Return the name of the class that an endpoint is a method of, as its qualified name says."""
    if not inspect.isfunction(endpoint):
        return None
    owner, _, _ = endpoint.__qualname__.rpartition(".")
    if not owner or owner.endswith("<locals>") or next(iter(inspect.signature(endpoint).parameters), "") != "self":
        return None
    return owner


def _with_endpoint(route: Any, endpoint: MethodType) -> Any:  # Any: of some class of route
    """Return a new route with this endpoint. Frameworks read the signature when they construct a route."""
    given = {
        name: getattr(route, name)
        for name in inspect.signature(type(route).__init__).parameters
        if name not in ("self", "endpoint") and hasattr(route, name)
    }
    return type(route)(**given, endpoint=endpoint)


def _request_app(instance: Any) -> ASGIApp:
    """Return an app for a callable that takes a request and returns the answer."""
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

    def answer(result: Any) -> ASGIApp:
        if isinstance(result, Response) or is_asgi(result):
            return cast(ASGIApp, result)
        if isinstance(result, str):
            return PlainTextResponse(result)
        if isinstance(result, bytes):
            return Response(result)
        if hasattr(result, "__aiter__") or inspect.isgenerator(result):
            return StreamingResponse(result, media_type="text/plain")
        try:
            return JSONResponse(result)
        except (TypeError, ValueError) as error:
            name, kind = getattr(instance, "__name__", type(instance).__name__), type(result).__name__
            wanted = "not text, bytes, a generator, a Response or valid JSON"
            raise TypeError(f"{name} returned a {kind}, which is {wanted} ({error}).") from None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif not callable(instance):
            await PlainTextResponse("This deployment takes no HTTP requests: only other deployments call it.", 404)(
                scope, receive, send
            )
        else:
            scope["endpoint"] = instance if inspect.isroutine(instance) else instance.__call__
            result = await call(instance, (Request(scope, receive),), {})
            await answer(result)(scope, receive, send)

    return app
