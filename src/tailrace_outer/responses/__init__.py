"""OpenAI's Responses API, as a wire. It uses the inside of conversations, whose items it shows."""
