"""A loop over a model and the tools of MCP servers, for Responses, as an extension of the server. A tool is called at
most once for each call of the model, whatever dies."""
