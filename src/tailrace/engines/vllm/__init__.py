"""vLLM, for GPUs. `engine` keeps the promise."""
