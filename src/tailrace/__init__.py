"""tailrace streams a local language model to whoever asks, and keeps each stream alive."""

__version__ = "0.1.0"
