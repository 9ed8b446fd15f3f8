"""vLLM, for GPUs. `engine` implements the interface."""
