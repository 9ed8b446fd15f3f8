"""The outer layer: parts of tailrace around its core, the package `tailrace`. They use the inside of the core.

Rule: the core imports nothing of this package. It finds these parts by their entry points, like the plugins. Only
`tailrace.serve` and `tailrace.engine`, the names that users' apps import, and `tailrace.testing` are re-exported there.
"""
