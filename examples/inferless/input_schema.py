"""What a request to this app may hold; anything else is refused, with the field's name."""

INPUT_SCHEMA = {
    "prompt": {"datatype": "STRING", "required": True, "shape": [1], "example": ["To the sea"]},
    "max_words": {"datatype": "INT16", "required": False, "shape": [1], "example": [20]},
}
IS_STREAMING_OUTPUT = True
