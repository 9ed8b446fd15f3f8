"""Conversations over HTTP, and their files: an extension of the server. The records keep them, and any wire may use
one.
"""
