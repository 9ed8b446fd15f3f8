"""Measures speed (`bench`) and exactness (`certify`). A server imports nothing from here."""
