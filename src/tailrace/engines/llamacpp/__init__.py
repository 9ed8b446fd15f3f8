"""llama.cpp, through xllamacpp: any GGUF file. `engine` keeps the promise; the others are its parts."""
