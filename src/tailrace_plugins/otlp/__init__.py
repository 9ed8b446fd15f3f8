"""Traces and metrics for OpenTelemetry: an extension of the server."""
