"""Counts which JSON schemas of real projects a server takes as `response_format`.

    python bench/schema_coverage.py FOLDER URL MODEL [--each 20] [--seed 11]

FOLDER is the folder `data` of the public repository guidance-ai/jsonschemabench. The same files of each of its folders
are taken every time, and one token is asked for with each schema. Prints taken / asked by folder, and the reasons of
the refusals.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
from pathlib import Path
from typing import Any

import httpx

FOLDERS = (
    "Glaiveai2K", "Github_trivial", "Github_easy", "Github_medium", "Github_hard", "Snowplow", "Kubernetes",
    "WashingtonPost", "JsonSchemaStore",
)  # fmt: skip


def sample(folder: Path, each: int, seed: int) -> list[tuple[str, Any]]:
    """Return random schemas of each folder."""
    rnd = random.Random(seed)
    found = []
    for name in FOLDERS:
        files = sorted((folder / name).glob("*.json"))
        for file in rnd.sample(files, min(each, len(files))):
            schema = json.loads(file.read_text())
            if isinstance(schema, dict) and "schema" in schema and "properties" not in schema:
                schema = schema["schema"]
            found.append((name, schema))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    taken, asked, why = (collections.Counter[str]() for _ in range(3))
    for name, schema in sample(args.folder, args.each, args.seed):
        body = {"model": args.model, "messages": [{"role": "user", "content": "Fill it in."}], "max_tokens": 1}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = httpx.post(f"{args.url}/v1/chat/completions", json=body, timeout=60)
        asked[name] += 1
        taken[name] += answer.is_success
        if not answer.is_success:
            why[f"{answer.status_code} {answer.text[:160]}"] += 1
    print(f"{taken.total()} of {asked.total()}", {name: f"{taken[name]}/{asked[name]}" for name in FOLDERS})
    for reason, count in why.most_common(20):
        print(count, reason)


if __name__ == "__main__":
    main()
