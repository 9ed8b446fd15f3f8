"""llama.cpp, through xllamacpp: any GGUF file. `engine` implements the interface; the other modules are its parts."""
