"""The server's certificate, which is reloaded when its files change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl

from tailrace.errors import ModelError
from tailrace.settings import Settings
from tailrace.system import eventloop

__all__ = ["Tls"]

logger = logging.getLogger("tailrace.server")

_POLL_S = 1.0


class Tls:
    """The TLS context for new connections. The certificate is reloaded when its files change, or on SIGHUP. Open
    connections keep the old one.

    Raises: ModelError for invalid files.
    """

    def __init__(self, settings: Settings) -> None:
        self._certificate = settings.tls_cert
        self._key = settings.tls_key or settings.tls_cert
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._seen = self._stamp()
        try:
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            raise ModelError(
                f"The certificate of --tls-cert and --tls-key cannot be used: {_reason(error)}. Both are PEM files."
            ) from None
        try:
            if settings.tls_client_ca:
                self.context.load_verify_locations(settings.tls_client_ca)
                self.context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise ModelError(f"The file of --tls-client-ca cannot be used: {_reason(error)}.") from None

    async def follow_files(self) -> None:
        """Reload the certificate when its files change, until cancelled."""
        reload_requested = asyncio.Event()
        with eventloop.on_hangup(reload_requested.set):
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reload_requested.wait(), _POLL_S)
                stamp = self._stamp()
                if reload_requested.is_set() or stamp != self._seen:
                    reload_requested.clear()
                    self._seen = stamp
                    self._reload()

    def _reload(self) -> None:
        try:
            # Try a separate context first: a failed load could leave a certificate without its key.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            logger.warning("the new certificate cannot be used, the old one stays: %s", _reason(error))
        else:
            logger.info("the certificate was reloaded")

    def _load(self, context: ssl.SSLContext) -> None:
        # Otherwise OpenSSL would ask for a key's password on the terminal.
        context.load_cert_chain(self._certificate, self._key, password=_refuse_password)

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        stamps = []
        for path in (self._certificate, self._key):
            try:
                status = os.stat(path)
            except OSError:  # a file that is replaced is missing for a moment
                stamps.append((0, 0))
            else:
                stamps.append((status.st_mtime_ns, status.st_ino))
        return tuple(stamps)


def _refuse_password() -> str:
    raise OSError("the key has a password; remove the password first")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{error.reason or error}".lower().replace("_", " ")
    return error.strerror or str(error)
