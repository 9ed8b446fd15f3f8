"""Files and batches: many requests in one file, answered when the server has time (docs/batches.md).

`/v1/files` and `/v1/batches` are as on OpenAI's API, `/v1/messages/batches` as on Anthropic's. Both make the same
batches. Each row of a batch is a request of its own, which the server sends to itself in the name of the batch's owner.
"""
