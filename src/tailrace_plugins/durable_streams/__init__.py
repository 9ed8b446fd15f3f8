"""Durable Streams: logs that clients create and append to, at `/v1/durable`.

The rules of the protocol need no sockets and no storage: `durable_store.py` and what it imports. The streams are kept
in the log store.
"""
