"""Requests and answers: the edge that checks each request, bodies, the writer of answers, WebSockets, the access log.

This package loads no model. Errors after the response headers become events.
"""
