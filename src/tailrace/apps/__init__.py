"""Serving what users wrote: the front, and the processes that run their code.

The law of this room: the front imports nothing of a user's. Whatever their code does, requests end, with an answer or a
terminal event, and the next one finds a process.
"""
