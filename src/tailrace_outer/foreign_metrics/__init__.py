"""`/metrics` under the names of other servers: an extension of the server."""
