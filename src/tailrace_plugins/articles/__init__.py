"""The wires of tutorials and articles: Ray Serve's chatbots, the FastAPI and vLLM articles."""
