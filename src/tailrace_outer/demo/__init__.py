"""`tailrace demo`: a page that shows streaming and the failures that a stream survives, and its server.

Rule: the server is a child process that may be killed at any time, also from the page. It listens on
127.0.0.1 only, and its data directory is deleted at the end. `tailrace serve` has no route of this package.
"""
