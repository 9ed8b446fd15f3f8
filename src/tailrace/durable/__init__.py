"""Durable Streams: logs that clients create and append to.

This package has the rules of the protocol, without sockets and without disk access. A log store keeps its records.
"""
