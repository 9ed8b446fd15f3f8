"""docs/engines.md agrees with the engines. TAILRACE_REGENERATE=1 generates its table."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.generated import check_table

from tailrace.engines import own_kinds
from tailrace.packages.requirements import install_command
from tailrace.types import SHAPING, Sampling
from tailrace_plugins.openvino.openvino_engine import PARAMETERS as OPENVINO

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "engines.md"
_OWN = {
    "openvino": "tailrace_kit/sampler",
    "llamacpp": "tailrace_plugins/llamacpp/llamacpp_sampling",
    "transformers": "tailrace_kit/sampler",
    "vllm": "tailrace_plugins/vllm/vllm_engine",
}
# Implemented by the server.
_SERVERS = (
    "max_tokens", "seed", "stop", "include_stop", "single_call", "n", "max_reasoning_tokens", "include_special",
)  # fmt: skip


def parameters(engine: str) -> set[str]:
    """Return `PARAMETERS` of an engine, read from its source, because not every library is installed."""
    source = (ROOT / "src" / f"{_OWN[engine]}.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARAMETERS":
            assert isinstance(node.value, ast.Call)
            return set(ast.literal_eval(node.value.args[0]))
    raise AssertionError(f"{engine} declares no PARAMETERS")


def in_the_checkout(command: str) -> str:
    """Return a command as a user types it in the checkout."""
    return command.replace(sys.executable, ".venv/bin/python")


def table() -> str:
    honoured = {engine: parameters(engine) for engine in _OWN}
    honoured["openvino"] |= OPENVINO
    names = sorted(set(Sampling.__struct_fields__) - set(_SERVERS))
    lines = [f"| parameter | {' | '.join(_OWN)} |", "|---|" + "---|" * len(_OWN)]
    for name in names:
        without = "left out" if name in SHAPING else "refused"
        cells = ["yes" if name in honoured[engine] else without for engine in _OWN]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_current() -> None:
    check_table(PAGE, "test_engines_page.py", table())


def test_every_engine_and_its_settings_are_on_the_page() -> None:
    text = PAGE.read_text()
    for kind in own_kinds().values():
        assert f"| `{kind.name}` |" in text
        if kind.extra:
            row = next(line for line in text.splitlines() if line.startswith(f"| `{kind.name}` |"))
            # The remedy is from the installation.
            assert row.endswith(f"| `{in_the_checkout(kind.remedy)}` |"), (
                "After a change of pyproject.toml: make install"
            )
        for name in kind.settings:
            flag = f"`--{name.replace('_', '-')}`"
            row = next(line for line in text.splitlines() if line.startswith("| `--") and flag in line)
            assert kind.name in row


def test_ray_is_installed_as_in_the_message() -> None:
    assert f"`{in_the_checkout(install_command(extra='ray'))}`" in (ROOT / "docs" / "deployments.md").read_text()


def test_all_parameters_are_fields_of_sampling() -> None:
    for engine in _OWN:
        assert parameters(engine) <= set(Sampling.__struct_fields__)
