"""Durable Streams: logs that clients make and append to.

The room's law: the protocol's rules, with no sockets and no disk. A log store keeps what it says.
"""
