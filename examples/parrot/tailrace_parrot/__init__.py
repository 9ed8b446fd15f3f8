from tailrace.engines import Kind

ENGINE = Kind(
    name="parrot",
    text="repeats the prompt",
    formats=("gguf", "openvino", "huggingface", "scripted"),
    cls="tailrace_parrot.engine:ParrotEngine",
    settings=("kv_tokens",),
    exact=True,
)
