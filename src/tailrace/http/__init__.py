"""HTTP and WebSocket: bytes in and out.

The room's law: it knows no model. Every request is answered within a bound, and what goes wrong after the headers
becomes an event.
"""
