"""The completions of llama.cpp's server, for editors that speak them."""
