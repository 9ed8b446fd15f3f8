"""The server: routes over the dialects, health, metrics, pages, lifecycle.

The room's law: it never runs model code.
"""
