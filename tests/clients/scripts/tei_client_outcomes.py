"""Runs tei-client. Prints what it gets."""

from __future__ import annotations

import asyncio
import json
import sys

from tei_client import HttpClient

job = json.loads(sys.argv[1])
client = HttpClient(job["url"])
metadata = client.info().server_model_metadata
if job["task"] == "embed":
    outcomes = [client.embed(job["texts"]), asyncio.run(client.async_embed(job["texts"])), metadata.pooling]
else:
    ranks = client.rerank(job["query"], job["texts"]).ranks
    outcomes = [[[one.index, one.score] for one in ranks], metadata.id2label]
json.dump(outcomes, sys.stdout, default=list)
