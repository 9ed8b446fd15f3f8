"""Measuring: speed (`bench`) and exactness (`certify`). Nothing here is imported by a server."""
