"""Asks with Triton's own client, and writes what it returned or raised: one entry for each of some questions.

It runs in an environment of its own and can import nothing of this project. A question has a `model`, `inputs` as names
with datatypes and values, and what else `infer` takes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import triton_to_np_dtype

Json = Any  # Any: JSON


def _input(name: str, datatype: str, value: Json, shape: list[int], binary: bool) -> InferInput:
    tensor = InferInput(name, shape, datatype)
    content = value.encode() if isinstance(value, str) else value
    tensor.set_data_from_numpy(
        numpy.array([content], dtype=triton_to_np_dtype(datatype)).reshape(shape), binary_data=binary
    )
    return tensor


def ask(client: InferenceServerClient, question: Json) -> Json:
    shape, binary = question.get("shape", [1]), question.get("binary", False)
    try:
        inputs = [_input(name, kind, value, shape, binary) for name, kind, value in question["inputs"]]
        in_binary = question.get("binary_output", False)
        wanted = [InferRequestedOutput(name, binary_data=in_binary) for name in question.get("outputs") or []]
        answer = client.infer(
            question["model"], inputs, outputs=wanted or None, model_version=question.get("version", ""),
            request_id=question.get("id", ""),
        )  # fmt: skip
    except Exception as error:
        status = error.status() if hasattr(error, "status") else None
        return {"error": type(error).__name__, "status": status, "message": str(error)}
    (output,) = answer.get_response()["outputs"]
    values = answer.as_numpy(output["name"])
    texts = [one.decode() if isinstance(one, bytes) else one for one in values.ravel().tolist()]
    is_binary = "binary_data_size" in output.get("parameters", {})
    return {"response": answer.get_response(), "shape": list(values.shape), "texts": texts, "is_binary": is_binary}


def main() -> None:
    job = json.loads(sys.argv[1])
    client = InferenceServerClient(job["address"], network_timeout=30)
    facts = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready("scripted"),
        "other_ready": client.is_model_ready("other"),
        "server": client.get_server_metadata(),
        "model": client.get_model_metadata("scripted", "1"),
        "config": client.get_model_config("scripted"),
    }
    outcomes = [facts, *(ask(client, question) for question in job["questions"])]
    client.close()
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
