"""Checks answers against JSON schemas in a short-lived process, since a schema of a client may take any time. Run by
its path, so that it imports only jsonschema_rs.

Standard input is a list in JSON, with a list for each answer: its schema, and its text. Standard output is a list for
each answer, with where it does not conform.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

__all__ = ["main"]

_CPU_S = 2
_MEMORY_BYTES = 512 * 2**20  # of address space
_MAX_NAMED = 10


def main() -> int:
    import jsonschema_rs

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    found = []
    for schema, text in json.load(sys.stdin):
        try:
            value = json.loads(text)
        except ValueError:
            found.append(["the answer is not JSON"])
            continue
        # A schema of another document is not fetched: it allows anything.
        options: dict[str, Any] = {"validate_formats": True, "retriever": lambda uri: {}}
        try:
            validator = jsonschema_rs.validator_for(schema, **options)
        except ValueError:  # of an unknown draft, or not quite valid
            rest = {name: one for name, one in schema.items() if name != "$schema"}
            validator = jsonschema_rs.Draft202012Validator(rest, **options)
        named = []
        for error in validator.iter_errors(value):
            keyword = next((step for step in reversed(error.schema_path) if isinstance(step, str)), "")
            named.append(f"{'/'.join(map(str, ['#', *error.instance_path]))} ({keyword})")
            if len(named) == _MAX_NAMED:
                break
        found.append(named)
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
