"""Measures speed (`bench`) and exactness (`certify`), and lists and deletes the models of this machine (`ls`, `rm`).

A server imports nothing from here.
"""
