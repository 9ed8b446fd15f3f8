"""Connections: listening sockets, TLS, HTTP/1.1 and WebSocket, with their limits and timeouts.

This package knows no wire and no stream. It gets a function that encodes its errors.
"""
