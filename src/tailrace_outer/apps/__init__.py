"""Serves user code: the front, and the processes that run the code.

Rule: the front never imports user code. Whatever user code does, every request ends with an answer or a
terminal event, and the next request finds a running process.
"""
