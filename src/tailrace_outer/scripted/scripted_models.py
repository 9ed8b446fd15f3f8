"""The model of the scripted engine: `scripted`, or `scripted:option=value,…`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tailrace.engines import FoundModel
from tailrace.errors import ModelError
from tailrace.models import ModelCard
from tailrace_outer.scripted.script import SCRIPT_TEMPLATE, read_script
from tailrace_outer.scripted.scripted_engine import (
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    EOS_ID,
    OPTIONS,
    THINKING_TEMPLATE,
    tokenizer_json,
)

__all__ = ["find_scripted"]

_MOST_DIMENSIONS = 65_536


def find_scripted(name: str) -> FoundModel:
    """Raises: ModelError for an unknown option, or a script that cannot be read."""
    options, script = _options(name.partition(":")[2])
    return FoundModel(_card(options, script), options)


def _card(options: Mapping[str, float], script: Path | None) -> ModelCard:
    """Raises: ModelError if the script is none, or for a number of dimensions that it does not have."""
    template = THINKING_TEMPLATE if options.get("thinks") else CHAT_TEMPLATE
    num_dimensions = options.get("embeds", 0)
    if not 0 <= num_dimensions <= _MOST_DIMENSIONS:  # also NaN
        raise ModelError(f"The scripted engine makes embeddings of 1 to {_MOST_DIMENSIONS} dimensions.")
    if script is not None:
        read_script(script)
        template = SCRIPT_TEMPLATE
    return ModelCard(
        name="scripted",
        path=script or Path(),
        format="scripted",
        tokenizer_json=tokenizer_json(),
        chat_template=template,
        bos_token="",
        eos_token=CONTROL_TOKENS[0],
        add_bos=False,
        eos_token_ids=(EOS_ID,),
        # Its tokens are bytes, and prompts of agents have a hundred thousand.
        context_tokens=65_536 if script is None else 1_048_576,
        task="embed" if num_dimensions else "rank" if options.get("ranks") else "generate",
        num_dimensions=int(num_dimensions),
    )


def _options(text: str) -> tuple[dict[str, float], Path | None]:
    """Return the numbers, and the path of the script. Raises: ModelError."""
    options, script = dict[str, float](), None
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if name == "script" and value:
            script = Path(value).absolute()
            continue
        if name not in OPTIONS:
            known = ", ".join((*OPTIONS, "script"))
            raise ModelError(f"The scripted engine has no option {name!r}. Its options are {known}.")
        try:
            options[name] = float(value)
        except ValueError:
            raise ModelError(f"{pair!r} is not an option of the scripted engine: write name=number.") from None
    return options, script
