"""Which servers a client trusts with `https`."""

from __future__ import annotations

import ssl

import httpx

__all__ = ["NOT_TRUSTED", "is_not_trusted", "trusted_certificates"]

NOT_TRUSTED = "shows a certificate that is not trusted; SSL_CERT_FILE names one that is"


def trusted_certificates() -> ssl.SSLContext:
    """Trust the certificates of the system, those of httpx (systems without any exist), and those in SSL_CERT_FILE.

    Raises: ValueError if SSL_CERT_FILE or SSL_CERT_DIR cannot be read.
    """
    try:
        context = httpx.create_ssl_context()
        context.load_default_certs()
    except OSError as error:
        raise ValueError(f"SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {error.strerror or error}.") from None
    return context


def is_not_trusted(error: httpx.HTTPError) -> bool:
    """Return whether a connection failed because of the server's certificate."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)
