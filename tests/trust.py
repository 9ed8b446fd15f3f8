"""Reads the certificates that clients trust when a connection needs them.

Each client of most HTTP libraries reads all of them when it is made, which takes 20 to 60 ms of a processor. Tests make
thousands of clients, nearly all of them for plain HTTP.
"""

from __future__ import annotations

import os
import ssl
from typing import Any

import certifi

__all__ = ["read_certificates_late"]

_OF_THE_SYSTEM = ssl.get_default_verify_paths()
_LATE = {certifi.where(), _OF_THE_SYSTEM.cafile, _OF_THE_SYSTEM.openssl_cafile, "/etc/ssl/certs/ca-certificates.crt"}
_USES = ("cert_store_stats", "get_ca_certs", "wrap_bio", "wrap_socket")


def _variables() -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))


_USUAL = _variables()


def read_certificates_late() -> None:
    """Change `ssl.SSLContext` for this process. Only files that are not the usual ones are read at once: they may be
    missing or no certificates."""
    of_files, defaults = ssl.SSLContext.load_verify_locations, ssl.SSLContext.load_default_certs

    def load(context: ssl.SSLContext, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        if cafile in _LATE and capath is None and cadata is None:
            _late(context).append((of_files, cafile))
        else:
            of_files(context, cafile, capath, cadata)

    def load_defaults(context: ssl.SSLContext, purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> None:
        if _variables() == _USUAL:
            _late(context).append((defaults, purpose))
        else:
            defaults(context, purpose)

    ssl.SSLContext.load_verify_locations = load  # type: ignore[assignment, method-assign]
    ssl.SSLContext.load_default_certs = load_defaults  # type: ignore[assignment, method-assign]
    for name in _USES:
        setattr(ssl.SSLContext, name, _reading(getattr(ssl.SSLContext, name)))


def _late(context: ssl.SSLContext) -> list[Any]:  # of functions, each with its argument
    late: list[Any] = context.__dict__.setdefault("late", [])
    return late


def _reading(use: Any) -> Any:  # Any: methods with several signatures
    def read_and_use(context: ssl.SSLContext, *args: Any, **options: Any) -> Any:
        for load, argument in context.__dict__.pop("late", ()):
            load(context, argument)
        return use(context, *args, **options)

    return read_and_use
