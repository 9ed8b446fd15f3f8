"""Triton's wire, which is also KServe's v2 protocol and Inferless'."""
