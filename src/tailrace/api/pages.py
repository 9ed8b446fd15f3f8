"""The chat page: static files from the folder `page`, read once and served from memory. Its folder `lib` has libraries,
which the build puts there (hatch_build.py).

The headers forbid the page to load from other servers or to connect to them, whatever text a model writes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.api.openapi import routes_page
from tailrace.http.asgi_answers import NO_INDEX

__all__ = ["NO_LIBRARIES", "PageFiles", "Pages", "answer_without_libraries", "has_libraries", "wants_page"]

NO_LIBRARIES = (
    "Its libraries are missing: npm's registry could not be reached. `make serve` in the checkout fetches them; or "
    "install tailrace again."
)
_WITHOUT = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>tailrace</title>
<link rel="stylesheet" href="page/base.css">
<link rel="stylesheet" href="page/docs.css">
<h1>tailrace is running, without its page</h1>
<p>{NO_LIBRARIES} Then start the server again.</p>
<p>All APIs work: <a href="docs">what this server answers</a>.</p>
</html>
"""

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"  # text cannot become markup by mistake
)
_HEADERS = {
    "cache-control": "no-cache",  # cached, but revalidated each time, so a new version is seen at once
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


class PageFiles:
    """The files in the folder `page` of a package. Raises: OSError if one cannot be read."""

    def __init__(self, package: str) -> None:
        with resources.as_file(resources.files(package).joinpath("page")) as folder:
            self._files = {
                path.relative_to(folder).as_posix(): _read(path.read_bytes(), _MEDIA_TYPES[path.suffix])
                for path in folder.rglob("*")
                if path.suffix in _MEDIA_TYPES
            }

    def answer(self, request: Request, name: str, headers: dict[str, str] | None = None) -> Response:
        """Raises: HTTPException if there is no such file."""
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        return _answer(request, file, headers or {})


def has_libraries() -> bool:
    """Return whether the libraries of the page were installed."""
    return resources.files("tailrace.api").joinpath("page", "lib", "preact.js").is_file()


def answer_without_libraries() -> Response:
    return Response(_WITHOUT, 503, {**_HEADERS, "cache-control": "no-store", "vary": "accept"}, _MEDIA_TYPES[".html"])


class Pages:
    """The page and its files. Raises: OSError if one cannot be read."""

    def __init__(self) -> None:
        self._has_libraries = has_libraries()
        self._files = PageFiles("tailrace.api")
        self._docs: _File | None = None

    def table(self) -> list[Route]:
        """Return the routes of the page's files. The page itself is `index`, if `wants_page`."""
        return [
            Route("/admin", self.admin, methods=["GET"]),
            Route("/share", self.share, methods=["GET"]),
            Route("/page/{name:path}", self.show_file, methods=["GET"]),
        ]

    async def index(self, request: Request) -> Response:
        if not self._has_libraries:
            return answer_without_libraries()
        return self._files.answer(request, "index.html", {"vary": "accept"})

    async def admin(self, request: Request) -> Response:
        """Return the page of an operator. It has nothing of the server: that needs the scope `admin`."""
        return self._files.answer(request, "admin.html") if self._has_libraries else answer_without_libraries()

    async def share(self, request: Request) -> Response:
        """Return the page that shows what a link shows. It works without the libraries, with less of Markdown."""
        return self._files.answer(request, "share.html", NO_INDEX)

    def docs(self, request: Request, document: bytes) -> Response:
        """Show all routes of an OpenAPI document. The page is made at its first request."""
        if self._docs is None:
            self._docs = _read(routes_page(msgspec.json.decode(document)), _MEDIA_TYPES[".html"])
        return _answer(request, self._docs, {})

    async def show_file(self, request: Request) -> Response:
        return self._files.answer(request, request.path_params["name"])


def wants_page(request: Request) -> bool:
    """Return whether Accept names HTML, and with at least the quality of plain text. Browsers do; curl sends `*/*`."""
    html_quality = text_quality = 0.0
    for part in ",".join(request.headers.getlist("accept")).split(","):
        kind, _, parameters = part.partition(";")
        match kind.strip().lower():
            case "text/html":
                html_quality = _quality(parameters)
            case "text/plain":
                text_quality = _quality(parameters)
    return html_quality > 0 and html_quality >= text_quality


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0


def _read(content: bytes, media_type: str) -> _File:
    return _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _answer(request: Request, file: _File, headers: dict[str, str]) -> Response:
    headers = {**_HEADERS, **headers, "etag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
