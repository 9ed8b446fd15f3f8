"""Serves Inferless apps unchanged: a folder with `app.py`, `input_schema.py` and their settings."""
