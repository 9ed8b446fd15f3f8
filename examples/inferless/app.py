"""An Inferless app: words of the prompt in another order, until a model stands in their place."""

import random
import time
from typing import Any


class InferlessPythonModel:
    def initialize(self) -> None:
        """Called once, before the first request: load your model here."""
        self.pause_s = 0.05

    def infer(self, inputs: dict[str, Any], stream_output_handler: Any) -> None:
        """Called for each request, in a thread, with what input_schema.py lets through."""
        words = inputs["prompt"].split()
        chance = random.Random(inputs["prompt"])
        for _ in range(inputs.get("max_words", 20)):
            word = chance.choice(words or ["nothing"])  # your model's next piece of text
            stream_output_handler.send_streamed_output({"generated_text": word + " "})
            time.sleep(self.pause_s)
        stream_output_handler.finalise_streamed_output()

    def finalize(self) -> None:
        """Called once, after the last request."""
