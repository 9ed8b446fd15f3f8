"""Run the commands of the Dockerfile's target `server` without a container engine, in chroots of Debian packages.

    sudo python -m scripts.try_dockerfile DIRECTORY [--base DIRECTORY]

Needs root, Linux and debootstrap. It makes DIRECTORY/build and DIRECTORY/server, and fails if the latter is larger than
450 MB. Then it imports the libraries of engines and drivers, and starts the server, as the image's user and with a
read-only root: a key, the health check, an answer, SIGTERM.
The base is Debian's minimal system, made from the same packages as the image debian:bookworm-slim. Package registries,
certificates and proxies are those of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_MOUNTS = ("proc", "sys", "dev")
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_MAX_MB = 450  # without a model
_LIBRARIES = (  # of which the Dockerfile removes parts, or which need libraries of the system
    "cryptography.hazmat.primitives.ciphers.aead", "hiredis", "llguidance", "openvino", "psycopg",
    "redis.asyncio", "sqlalchemy", "tokenizers", "uvloop", "xllamacpp",
)  # fmt: skip


@dataclass
class Stage:
    """One stage of the Dockerfile: its file system, and what its instructions have set."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "0:0"
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions with their texts. Comments are removed, and lines are joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def _slim(base: Path) -> None:
    """Make it what debian:bookworm-slim is: no manuals, translations and downloaded packages, also later."""
    unwanted = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian")
    (base / "etc/dpkg/dpkg.cfg.d/slim").write_text("".join(f"path-exclude /{name}/*\n" for name in unwanted))
    clean = "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"
    hooks = "".join(f'{moment} {{ "{clean}"; }};\n' for moment in ("DPkg::Post-Invoke", "APT::Update::Post-Invoke"))
    (base / "etc/apt/apt.conf.d/slim").write_text(f'{hooks}Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n')
    for name in (*unwanted, "var/cache/apt/archives", "var/lib/apt/lists"):
        for path in (base / name).iterdir():
            _run("rm", "-rf", str(path))


def build(directory: Path, base: Path) -> Stage:
    """Run the stages up to `server`."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for name, rest in instructions((_ROOT / "Dockerfile").read_text()):
        if name == "FROM":
            if "server" in stages:
                return stages["server"]
            _, _, alias = rest.partition(" AS ")
            stage = stages[alias] = Stage(directory / alias)
            _run("cp", "-a", str(base), str(stage.path))
            continue
        assert stage is not None
        print(f"{name} {rest[:100]}", flush=True)
        _step(stage, name, rest, stages)
    raise AssertionError("the Dockerfile has no stage after `server`")


def _step(stage: Stage, name: str, rest: str, stages: dict[str, Stage]) -> None:
    match name:
        case "ARG":
            key, _, value = rest.partition("=")
            stage.arguments[key] = value
        case "ENV":
            stage.environment |= dict(part.split("=", 1) for part in shlex.split(rest))
        case "WORKDIR":
            stage.directory = rest
            (stage.path / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "USER":
            stage.user = rest
        case "COPY":
            _copy(stage, rest, stages)
        case "RUN":
            in_chroot(stage, ["sh", "-c", rest], network=True)
        case "HEALTHCHECK":
            stage.health = json.loads(rest.partition("CMD ")[2])
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        case "VOLUME" | "EXPOSE" | "CMD":
            pass
        case _:
            raise AssertionError(f"{name} is not known here")


def _copy(stage: Stage, rest: str, stages: dict[str, Stage]) -> None:
    source = _ROOT
    if found := re.match(r"--from=(\S+) ", rest):
        source, rest = stages[found[1]].path, rest[found.end() :]
    *names, target = rest.split()
    place = stage.path / os.path.normpath(os.path.join(stage.directory, target)).lstrip("/")
    for name in names:
        given = source / name.lstrip("/")
        if given.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "lib") if source == _ROOT else None
            shutil.copytree(given, place, symlinks=True, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy2(given, place / Path(name).name if target.endswith("/") else place)


def in_chroot(stage: Stage, command: list[str], *, network: bool = False) -> None:
    """Run a command in the stage's file system, with this machine's registries and certificates if it needs them."""
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **stage.environment}
    lent = {}
    if network:
        lent = {Path("/etc/resolv.conf"): "etc/resolv.conf", Path("/etc/pip.conf"): "etc/pip.conf"}
        lent = {file: name for file, name in lent.items() if file.exists()} | {_CERTIFICATES: "run/certificates.crt"}
        names = ("PIP_CERT", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "NPM_CONFIG_CAFILE")
        environment |= dict.fromkeys(names, "/run/certificates.crt") | {"DEBIAN_FRONTEND": "noninteractive"}
        environment |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    for file, name in lent.items():
        shutil.copy2(file, stage.path / name)
    environment |= stage.arguments
    script = f"{_mounts(stage.path)} exec chroot {stage.path} env -i "
    script += " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())
    script += f" sh -c 'cd {stage.directory} && exec \"$@\"' sh {shlex.join(command)}"
    try:
        _run("unshare", "--mount", "sh", "-euc", script)
    finally:
        for name in lent.values():
            (stage.path / name).unlink()


def _mounts(path: Path) -> str:
    return "".join(f"mount --rbind /{name} {path}/{name}; " for name in _MOUNTS)


def serve(stage: Stage, directory: Path) -> None:
    """Start the server as the image would, with a read-only root, and let it answer."""
    data, temporary = directory / "data", directory / "tmp"
    uid, _, gid = stage.user.partition(":")
    for place in (data, temporary):
        place.mkdir(exist_ok=True)
        os.chown(place, int(uid), int(gid))
    root = stage.path
    environment = " ".join(shlex.quote(f"{name}={value}") for name, value in stage.environment.items())

    def inside(*command: str) -> list[str]:
        script = f"mount --bind {root} {root}; mount -o remount,bind,ro {root}; {_mounts(root)}"
        script += f"mount --bind {data} {root}/var/lib/tailrace; mount --bind {temporary} {root}/tmp; "
        script += f"exec chroot --userspec={stage.user} {root} env -i {environment} {shlex.join(command)}"
        return ["unshare", "--mount", "sh", "-euc", script]

    refused = subprocess.run(inside(*stage.entrypoint, "serve", "scripted"), capture_output=True, text=True)
    assert refused.returncode != 0, "it has started without keys"
    assert "there are no keys" in refused.stderr, refused.stderr
    written = subprocess.run(inside("touch", "/etc/x"), capture_output=True, text=True)
    assert "Read-only file system" in written.stderr, written.stderr
    subprocess.run(inside("python3", "-c", f"import {', '.join(_LIBRARIES)}"), check=True)
    made = subprocess.run(inside(*stage.entrypoint, "keys", "create", "me", "--json"), capture_output=True, check=True)
    token = json.loads(made.stdout)["token"]
    server = subprocess.Popen(inside(*stage.entrypoint, "serve", "scripted"))
    try:
        started_s = time.monotonic()
        while subprocess.run(inside(*stage.health), capture_output=True).returncode:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() - started_s < 120, "the health check fails"
            time.sleep(0.5)
        print(f"healthy after {time.monotonic() - started_s:.1f} s")
        body = json.dumps({"model": "scripted", "prompt": "Hi", "max_tokens": 5}).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            print(json.load(answer)["choices"][0])
    finally:
        server.terminate()
        print("ended with", server.wait(timeout=60))


def size_bytes(path: Path) -> int:
    """Return the size of all files, as an image counts them."""
    return int(subprocess.run(["du", "-sxb", str(path)], capture_output=True, check=True).stdout.split()[0])


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--base", type=Path, help="a Debian made by debootstrap --variant=minbase bookworm")
    args = parser.parse_args()
    if os.geteuid() or sys.platform != "linux":
        parser.error("needs root on Linux")
    directory = args.directory.resolve()
    directory.mkdir(parents=True)
    base = directory / "base"
    if args.base is None:
        _run("debootstrap", "--variant=minbase", "bookworm", str(base))
    else:
        _run("cp", "-a", str(args.base), str(base))
    _slim(base)
    stage = build(directory, base)
    size_mb = size_bytes(stage.path) / 1e6
    print(f"{size_mb:.0f} MB, of which {size_bytes(base) / 1e6:.0f} MB are the base")
    assert size_mb < _MAX_MB
    serve(stage, directory)


if __name__ == "__main__":
    main()
