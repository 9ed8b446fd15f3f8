"""HTTP and WebSocket: bytes in and out.

This package knows nothing about models. Every wait has a timeout. Errors after the response headers become events.
"""
