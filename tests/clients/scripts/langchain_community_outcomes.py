"""Asks with LangChain's older client of text-generation-inference and the `text-generation` package beneath it, both
with the defaults that they have, and writes what they returned.

It runs in an environment of its own and can import nothing of this project.
"""

from __future__ import annotations

import json
import sys
import warnings

PROMPT = "Once upon a time"


def main(url: str) -> None:
    warnings.simplefilter("ignore")  # LangChain's is deprecated: it says so, and switches its warnings on
    from langchain_community.llms import HuggingFaceTextGenInference
    from text_generation import Client

    warnings.simplefilter("ignore")
    model = HuggingFaceTextGenInference(inference_server_url=f"{url}/", max_new_tokens=12)
    streamed = "".join(model.stream(PROMPT))
    sys.stdout.write(json.dumps([model.invoke(PROMPT), streamed, Client(url).generate(PROMPT).generated_text]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1])["url"])
