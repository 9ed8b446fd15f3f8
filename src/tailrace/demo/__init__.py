"""`tailrace demo`: a page that shows what streaming is and what a stream survives, and the server behind it.

The room's law: the server is a child that may be killed at any time, also from the page. It listens on 127.0.0.1 only,
and keeps what it has in a directory that goes when the demo ends. `tailrace serve` has none of this.
"""
