from tailrace.extensions import Extension, Setting

EXTENSION = Extension(
    "parrot",
    "tailrace_parrot.memory:open_memory",
    settings=(Setting("parrot_phrases", 100, "Phrases that the parrot remembers of each user.", int, least=1),),
)
