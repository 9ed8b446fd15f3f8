"""Command lines and variables of TGI's launcher become those of this server."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.api.process import environment
from tests.generated import check_table
from tests.waiting import LONG_S

from tailrace.cli import main
from tailrace.cli.serve import serve
from tailrace.engines import OPTIONAL_SETTINGS, own_kinds
from tailrace.settings import settings_of, settings_table
from tailrace_plugins.tgi.launcher import FLAGS, VARIABLES, from_tgi, translated

PAGE = Path(__file__).parents[3] / "docs" / "from-tgi.md"


def ran(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(from_tgi, words, env={"TAILRACE_PORT": None, **dict.fromkeys(VARIABLES), **variables})


def command(*words: str, **variables: str) -> list[str]:
    result = ran(*words, **variables)
    assert result.exit_code == 0, result.output
    return shlex.split(result.stdout)


def test_the_table_of_the_page_is_current() -> None:
    lines = ["| TGI | here |", "|---|---|"]
    for name, flag in FLAGS.items():
        becomes = f"`{flag.becomes}`" if flag.becomes else ""
        lines.append(f"| `--{name}` | {', '.join(text for text in (becomes, flag.note) if text)} |")
    lines += [f"| `{name}` | {note} |" for name, note in VARIABLES.items()]
    check_table(PAGE, "plugins/tgi/test_launcher.py", "\n".join(lines) + "\n")


def test_each_flag_says_what_becomes_of_it() -> None:
    shown = " ".join(ran("--help").output.split())
    for name, flag in FLAGS.items():
        assert f"--{name}" in shown
        assert flag.becomes or flag.note


def test_flags_with_the_same_value() -> None:
    words = command(
        "--model-id", "org/name", "--max-total-tokens", "4096", "--max-batch-total-tokens", "20000",
        "--max-batch-prefill-tokens", "512", "--max-batch-size", "8", "--max-concurrent-requests", "20",
        "--payload-limit", "3000", "-p", "8080", "--hostname", "127.0.0.1", "-g", "30", "--cors-allow-origin", "https://a",
    )  # fmt: skip
    assert words[:3] == ["tailrace", "serve", "hf:org/name"]
    assert dict(zip(words[3::2], words[4::2], strict=True)) == {
        "--context-tokens": "4096", "--kv-tokens": "20000", "--max-step-tokens": "512", "--max-sequences": "8",
        "--max-concurrent-requests": "20", "--body-bytes": "3000", "--port": "8080", "--host": "127.0.0.1",
        "--drain-s": "30", "--allowed-origins": "https://a",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--num-shard 2", "--engine vllm --gpus 2"),
        ("--num-shard 2 --sharded false", ""),
        ("--json-output", "--log-format json"),
        ("--lora-adapters poet=/a,law=/b", "--adapter poet=/a --adapter law=/b"),
        ("--trust-remote-code --cuda-graphs 1,2", ""),
        ("--dtype float16 --cuda-memory-fraction 0.5 --quantize eetq --speculate 3", ""),
        (
            "--num-shard 2 --dtype float16 --cuda-memory-fraction 0.5 --quantize eetq --speculate 3",
            "--dtype float16 --gpu-memory 0.5 --engine vllm --gpus 2",
        ),
    ],
)
def test_flags_with_another_value(given: str, expected: str) -> None:
    plain = command("--model-id", "a/b", "--api-key", "secret")
    words = command("--model-id", "a/b", "--api-key", "secret", *given.split())
    for word in plain:
        words.remove(word)
    assert " ".join(words) == expected


# Values of the flags that become something; for shards see below.
_SAMPLES = {
    "quantize": "eetq bitsandbytes-nf4 awq", "dtype": "bfloat16", "speculate": "3", "lora-adapters": "poet=/a",
    "max-total-tokens": "4096", "max-batch-total-tokens": "20000", "max-batch-prefill-tokens": "4096",
    "max-batch-size": "8", "max-concurrent-requests": "20", "payload-limit": "3000", "hostname": "::1", "port": "8080",
    "cors-allow-origin": "https://a", "graceful-termination-timeout": "60", "json-output": "", "api-key": "secret",
    "cuda-memory-fraction": "1.0",
}  # fmt: skip
_OF_ENGINES = ("quantize", "dtype", "speculate", "lora-adapters", "max-batch-total-tokens", "max-batch-prefill-tokens",
               "cuda-memory-fraction")  # fmt: skip


def _accept(given: dict[str, str], variables: dict[str, str]) -> None:
    """Check the words of `tailrace serve` as it does, for each engine that it may choose for a repository."""
    words = translated({"model-id": "a/b", **given}, variables).words
    values = serve.make_context("serve", words).params
    settings = settings_of({row.name: values[row.name] for row in settings_table()})
    for kind in own_kinds().values():
        if "huggingface" in kind.formats and settings.engine in ("auto", kind.name):
            kind.check(OPTIONAL_SETTINGS & settings.changed.keys())


def test_the_server_accepts_every_combination() -> None:
    assert set(_SAMPLES) >= {name for name, flag in FLAGS.items() if flag.becomes}
    for shards in ({}, {"num-shard": "2"}, {"num-shard": "2", "sharded": "false"}):
        for name, samples in _SAMPLES.items():
            for sample in samples.split(" "):
                _accept({**shards, name: sample}, {"LOG_LEVEL": "warn", "PREFIX_CACHING": "0"})
        for size in range(2, len(_OF_ENGINES) + 1):
            for names in itertools.combinations(_OF_ENGINES, size):
                _accept({**shards, **{name: _SAMPLES[name].split(" ")[0] for name in names}}, {})


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ("--dtype bfloat16", "--engine vllm --dtype bfloat16"),
        ("--cuda-memory-fraction 0.5", "--engine vllm --gpu-memory 0.5"),
        ("--num-shard 2 --dtype bfloat16 --speculate 3", "--engine openvino --prompt-lookup-tokens 3"),
    ],
)
def test_what_is_left_out_is_said(given: str, left_out: str) -> None:
    said = ran("--model-id", "a/b", *given.split()).stderr
    assert re.findall("With it: (.*)", said) == [left_out]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LOG_LEVEL": "warn"}, ["--log-level", "warning"]),
        ({"LOG_LEVEL": "info,text_generation_router=debug"}, ["--log-level", "info"]),
        ({"LOG_LEVEL": "text_generation_router=debug"}, []),
        ({"PREFIX_CACHING": "0"}, ["--no-prefix-cache"]),
        ({"PREFIX_CACHING": "True", "ATTENTION": "paged", "PREFILL_CHUNKING": "1"}, []),
    ],
)
def test_variables_without_a_flag(variables: dict[str, str], expected: list[str]) -> None:
    result = ran("--model-id", "a/b", "--api-key", "secret", **variables)
    assert shlex.split(result.stdout) == [*command("--model-id", "a/b", "--api-key", "secret"), *expected]
    assert {line.split(":")[0] for line in result.stderr.splitlines()} == {
        "# --api-key",
        *(f"# {n}" for n in variables),
    }


def test_every_given_flag_without_a_plain_counterpart_is_explained() -> None:
    result = ran("--model-id", "a/b", "--cuda-graphs", "0", "--otlp-endpoint", "http://c", "--api-key", "secret")
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [
        "# --api-key",
        "# --otlp-endpoint",
        "# --cuda-graphs",
    ]
    assert "secret" not in result.output


def test_without_a_key_it_is_as_open_as_tgi_and_says_so() -> None:
    result = ran("--model-id", "a/b")
    assert result.stdout == "tailrace serve hf:a/b --host 0.0.0.0 --port 3000 --insecure\n"
    assert "answers everybody" in result.stderr
    assert "--insecure" not in command("--model-id", "a/b", "--hostname", "127.0.0.1")


def test_variables_are_read_as_by_the_launcher() -> None:
    words = command(MODEL_ID="a/b", MAX_TOTAL_TOKENS="512", PORT="80", HUGGINGFACE_HUB_CACHE="/data", HOSTNAME="f00")
    assert words[:5] == ["HF_HUB_CACHE=/data", "tailrace", "serve", "hf:a/b", "--context-tokens"]
    assert "f00" not in words


def test_a_directory_is_one(tmp_path: Path) -> None:
    assert command("--model-id", str(tmp_path))[2] == str(tmp_path)


def test_a_name_of_the_catalogue_is_one() -> None:
    assert [command("--model-id", name)[2] for name in ("smollm2", "Qwen3-4B")] == ["smollm2", "Qwen3-4B"]


def test_the_revision_that_is_fetched_anyway() -> None:
    result = ran("--model-id", "a/b", "--revision", "main")
    assert (result.exit_code, "--revision" in result.output) == (0, False)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--revision abc", "--revision main is fetched"),
        ("--rope-factor 2", "--rope-factor has no counterpart"),
        ("--num-shard x", "--num-shard should be a number"),
        ("--num-shard 0", "--num-shard should be a number"),
        ("--max-totl-tokens 5", "--max-total-tokens"),  # what it may have meant
    ],
)
def test_what_would_change_answers_is_refused(given: str, reason: str) -> None:
    result = ran("--model-id", "a/b", *given.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert reason in result.stderr


def test_origins_may_be_given_one_by_one() -> None:
    flags = ("--cors-allow-origin", "https://a.example", "--cors-allow-origin", "https://b.example")
    words = command("--model-id", "org/name", *flags)
    assert words[words.index("--allowed-origins") + 1] == "https://a.example,https://b.example"


def test_a_model_is_needed() -> None:
    assert "--model-id is missing" in ran().stderr


def test_the_command_is_there() -> None:
    assert "from-tgi" in CliRunner().invoke(main, ["--help"]).output


def test_run_starts_the_server(tmp_path: Path) -> None:
    """The model is a server that is not there: its error shows that the flags have arrived."""
    code = "from tailrace_plugins.tgi.launcher import from_tgi; from_tgi()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--run", "--model-id", str(tmp_path), "--hostname", "127.0.0.1"],
        capture_output=True, text=True, check=False, timeout=LONG_S, env=environment() | {"PORT": "0"},
    )  # fmt: skip
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
