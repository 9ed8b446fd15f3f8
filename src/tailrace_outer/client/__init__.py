"""A client of servers: tailrace's, whose answers it resumes, and others with OpenAI's wire; and what commands that use
one have in common.

Rule: it uses servers only over HTTP, and imports no server code.
"""
