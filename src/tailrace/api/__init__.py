"""The server: routes over the dialects, health, metrics, pages, lifecycle.

Rule: it never runs model code.
"""
