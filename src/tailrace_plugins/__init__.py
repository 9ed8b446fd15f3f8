"""Plugins that are installed with tailrace. They use only the public names of docs/api.md, as packages of others do.

Rule: tailrace imports no plugin; it finds them by their entry points. No plugin imports another one, except
Inferless, whose apps speak Triton's wire.
"""
