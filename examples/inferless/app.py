"""An Inferless app: it says what it was asked, word by word, until a model stands in its place."""

import time
from typing import Any


class InferlessPythonModel:
    def initialize(self) -> None:
        """Called once, before the first request: load your model here."""
        self.pause_s = 0.05

    def infer(self, inputs: dict[str, Any], stream_output_handler: Any) -> None:
        """Called for each request, in a thread, with what input_schema.py lets through."""
        text = f'You wrote "{inputs["prompt"]}". A model of yours would go on from there.'  # your model's answer
        for word in text.split()[: inputs.get("max_words", 20)]:
            stream_output_handler.send_streamed_output({"generated_text": word + " "})
            time.sleep(self.pause_s)
        stream_output_handler.finalise_streamed_output()

    def finalize(self) -> None:
        """Called once, after the last request."""
