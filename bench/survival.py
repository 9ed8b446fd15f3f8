"""What clients get from tailrace and from other servers when something fails.

    python bench/survival.py --model GGUF --checkpoint DIRECTORY [--peers FOLDER] [--only NAME,…] [--faults NAME,…]
                             [--turns 2] [--output JSON]
    python bench/survival.py --table JSON

docs/survival.md explains it, and says how to make FOLDER, which has a virtual environment for each server. One client
(bench/survival_client.py) asks each server for the same answer, and a fault strikes in its middle. Each server has its
own best settings and its own recovery, and a supervisor that starts it again. What the client shows at the end is
compared with what the same server answers undisturbed: the answers are greedy, so a server that repeats itself gives
the same tokens when it is asked again. `--table` prints the tables of docs/survival.md and README.md from the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from machine import this_machine
from servers import redis_server
from survival_client import Reader, Wire, count
from survival_peers import NUM_TOKENS, PEERS, Peer, Team
from survival_servers import ServerFailed, free_port

MARK = 32  # tokens that the client has when the fault strikes
AWAY_S = 2.0
SLEEP_S = 10.0
QUESTION = "Write a long story about a river, a dog and a mill."
GREEDY: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}], "max_tokens": NUM_TOKENS, "temperature": 0,
}  # fmt: skip
SAMPLED = GREEDY | {"temperature": 0.8}

Row = dict[str, object]


class Trial:
    """One answer of a server, with its readers."""

    def __init__(self, team: Team, body: dict[str, Any]) -> None:
        self.team = team
        self.wire: Wire = team.peer.wire(body)
        self.reader = Reader(self.wire, team.addresses, mark=MARK)
        self.second: Reader | None = None
        self.facts: dict[str, object] = {}

    def begin(self) -> None:
        """Return when the client has so many tokens."""
        self.team.remember_work()
        self.reader.start()
        self.reader.marked.wait()

    def finish(self) -> None:
        self.reader.join()

    def whole(self) -> str:
        """Return what a client gets that reads the answer from its start, after its end."""
        late = Reader(self.wire.of_another_reader(), self.team.addresses, mark=MARK, joins=True)
        late.start()
        late.join()
        return late.text


def client_cut(trial: Trial) -> None:
    trial.reader.cut(AWAY_S)
    trial.begin()


def slow_reader(trial: Trial) -> None:
    """The client reads nothing for a while; another one beside it asks the same."""
    trial.reader.sleep(SLEEP_S)
    trial.begin()
    beside = Reader(trial.team.peer.wire(GREEDY), trial.team.addresses, mark=MARK)
    beside.start()
    beside.join()
    trial.facts["silence_beside_s"] = round(beside.silence_s, 2)


def second_reader(trial: Trial) -> None:
    """Another client reads the same answer from its start."""
    trial.begin()
    trial.second = Reader(trial.wire.of_another_reader(), trial.team.addresses, mark=MARK, joins=True)
    trial.second.start()
    trial.second.join()


def server_killed(trial: Trial) -> None:
    trial.begin()
    trial.team.kill_server()


def engine_killed(trial: Trial) -> None:
    trial.begin()
    trial.facts["engine"] = trial.team.kill_engine()


def stopped(trial: Trial) -> None:
    trial.begin()
    trial.facts["stopped_after_s"] = round(trial.team.stop(), 2)


def rolling_restart(trial: Trial) -> None:
    trial.begin()
    trial.team.roll()


def machine_lost(trial: Trial) -> None:
    trial.begin()
    trial.team.remove_machine()


FAULTS: dict[str, tuple[Callable[[Trial], None], bool]] = {  # and whether it takes two servers
    "client away for 2 s": (client_cut, False),
    "reader asleep for 10 s": (slow_reader, False),
    "second reader": (second_reader, False),
    "server killed": (server_killed, False),
    "server killed (sampled)": (server_killed, False),
    "engine killed": (engine_killed, False),
    "stop": (stopped, False),
    "rolling restart": (rolling_restart, True),
    "machine lost": (machine_lost, True),
}


def row(trial: Trial, fault: str, expected: str, tokenizer: Tokenizer) -> Row:
    """What the client got. `expected` is what the server answers undisturbed."""
    reader = trial.second or trial.reader
    if fault.endswith("(sampled)"):  # no answer is right: one is, that the server shows to everybody
        expected = trial.whole() if reader.ways[-1:] == ["continued"] else reader.text
        counts = asdict(count(reader.text, reader.before, expected, tokenizer))
        if reader.before:  # what the user had seen, and now reads differently
            pairs = enumerate(zip(reader.before[0], reader.text, strict=False))
            same = next((index for index, (old, new) in pairs if old != new), len(reader.text))
            counts["changed"] = count(reader.before[0][same:], [], "", tokenizer).doubled
    else:
        counts = asdict(count(reader.text, reader.before, expected, tokenizer))
    return {
        **counts,
        "silence_s": round(reader.silence_s, 2),
        "is_complete": reader.is_complete,
        "told": reader.told,
        "ways": reader.ways,
        **trial.facts,
    }


def undisturbed(team: Team) -> Reader:
    """Return a reader of an answer without a fault. Raises: ServerFailed if there is none."""
    trial = Trial(team, GREEDY)
    trial.begin()
    trial.finish()
    if not trial.reader.is_complete or not trial.reader.text:
        raise ServerFailed(f"{team.peer.name} gave nothing: {trial.reader.told}")
    return trial.reader


def measure(
    peer: Peer, folder: Path, redis_url: str, turns: int, faults: list[str], tokenizer: Tokenizer
) -> Iterator[Row]:
    """Yield the rows of a server, one of each fault in each turn."""
    for number, pair in enumerate((False, True)):
        chosen = [fault for fault in faults if FAULTS[fault][1] == pair]
        if not chosen:
            continue
        place = folder / f"{peer.key}-{number}"
        place.mkdir()
        with contextlib.closing(peer.team(place, redis_url if pair else "")) as team:
            team.wait_ready()
            first, second = undisturbed(team), undisturbed(team)
            facts = {
                "silence_undisturbed_s": round(second.silence_s, 2),
                "repeats_itself": first.text == second.text,
            }
            for turn in range(1, turns + 1):
                for fault in chosen:
                    team.wait_ready()
                    trial = Trial(team, SAMPLED if fault.endswith("(sampled)") else GREEDY)
                    FAULTS[fault][0](trial)
                    trial.finish()
                    found = row(trial, fault, second.text, tokenizer)
                    load = round(os.getloadavg()[0], 1)
                    yield {"server": peer.name, "fault": fault, "turn": turn, **found, **facts, "load_average": load}
                    team.repair()


class Cell:
    """What one server gave at one fault, in all turns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def figure(self, name: str) -> str:
        """Return the figures of the turns, or one if they are the same."""
        values = [f"{one[name]:.1f} s" if name == "silence_s" else str(one[name]) for one in self.rows]
        return values[0] if len(set(values)) == 1 else ", ".join(values)

    def words(self, name: str, begin: int = 0) -> list[str]:
        """Return the different words of all turns."""
        return list(dict.fromkeys(word for one in self.rows for word in one[name][begin:]))

    @property
    def way(self) -> str:
        """How the client went on."""
        joined = self.rows[0]["fault"] == "second reader"
        if joined and not self.words("ways"):
            return "no way"
        ways = self.words("ways", 0 if joined else 1)
        return ", ".join(ways or ["did nothing"]) + ("" if self.is_complete else ", gave up")

    @property
    def is_complete(self) -> bool:
        return all(one["is_complete"] for one in self.rows)

    @property
    def short(self) -> str:
        """What the user sees, in a word. Without seconds, since not all servers met the same load."""
        if self.way == "no way":
            return "no way"
        wrong = [name for name in ("lost", "doubled", "changed") if any(one[name] for one in self.rows)]
        if not self.is_complete or "lost" in wrong:
            return f"{max(one['lost'] for one in self.rows)} tokens lost"
        if any(one["again"] for one in self.rows):
            return "starts again" + (", other words" if wrong else "")
        return "**goes on**" if not wrong else "other tokens"


def _cells(results: dict[str, Any]) -> dict[tuple[str, str], Cell]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in results["rows"]:
        found.setdefault((one["fault"], one["server"]), []).append(one)
    return {key: Cell(rows) for key, rows in found.items()}


def table(results: dict[str, Any]) -> str:
    """Return the table of docs/survival.md: a row for each fault and server, with the figures of all turns."""
    lines = ["| fault | server | lost | doubled | changed | again | silence | the client | it was told |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    cells = _cells(results)
    for fault in FAULTS:
        for server in results["servers"]:
            if cell := cells.get((fault, server)):
                names = ("lost", "doubled", "changed", "again", "silence_s")
                figures = [cell.figure(name) for name in names] if cell.way != "no way" else [""] * len(names)
                words = "; ".join(cell.words("told")).replace("|", "\\|")
                lines.append(f"| {' | '.join([fault, server, *figures, cell.way, words])} |")
    return "\n".join(lines)


def short_table(results: dict[str, Any]) -> str:
    """Return the table of README.md: a row for each fault, a column for each server."""
    cells = _cells(results)
    servers = list(results["servers"])
    lines = [f"| in the middle of an answer | {' | '.join(servers)} |", "|---" * (1 + len(servers)) + "|"]
    for fault in FAULTS:
        shown = [cells[fault, server].short if (fault, server) in cells else "" for server in servers]
        if any(shown):
            lines.append(f"| {fault} | {' | '.join(shown)} |")
    return "\n".join(lines)


def versions_table(results: dict[str, Any]) -> str:
    """Return what ran, how, and how busy the machine was."""
    lines = ["| server | version | command | longest silence undisturbed | load average |", "|---|---|---|---|---|"]
    for name, one in results["servers"].items():
        rows = [row for row in results["rows"] if row["server"] == name]
        loads = [row["load_average"] for row in rows]
        silence_s = max(row["silence_undisturbed_s"] for row in rows)
        busy = f"{min(loads):.0f} to {max(loads):.0f}"
        lines.append(f"| {name} | {one['version']} | `{one['runs']}` | {silence_s:.1f} s | {busy} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file, for tailrace and llama.cpp")
    parser.add_argument("--checkpoint", type=Path, help="the same model as a directory, for the others")
    parser.add_argument("--peers", type=Path, help="a folder with a virtual environment for each other server")
    parser.add_argument("--only", default=",".join(PEERS), help="names of servers")
    parser.add_argument("--faults", default=",".join(FAULTS), help="names of faults")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--table", type=Path, metavar="JSON", help="print the table of these results, and measure nothing"
    )
    options = parser.parse_args()
    results: dict[str, Any]
    if options.table:
        results = json.loads(options.table.read_text())
        print(*(make(results) for make in (versions_table, table, short_table)), sep="\n\n")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    faults = options.faults.split(",")
    results = {"request": GREEDY, "servers": {}, "rows": []}
    if options.output and options.output.exists():  # the rows that are measured now are replaced
        results = json.loads(options.output.read_text())
    folders = tempfile.TemporaryDirectory(prefix="survival-")
    with folders as folder, redis_server(Path(folder), free_port()) as redis_url:
        for peer in [PEERS[key](options) for key in options.only.split(",")]:
            where = this_machine() | {"date": time.strftime("%Y-%m-%d")}
            results["servers"][peer.name] = {"version": peer.version(), "runs": peer.shown, "measured": where}
            results["rows"] = [
                one for one in results["rows"] if one["server"] != peer.name or one["fault"] not in faults
            ]
            try:
                for found in measure(peer, Path(folder), redis_url, options.turns, faults, tokenizer):
                    print(json.dumps(found), flush=True)
                    results["rows"].append(found)
                    if options.output:  # at once: an interrupted run keeps what it has
                        options.output.write_text(json.dumps(results, indent=1) + "\n")
            except ServerFailed as error:
                print(error, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
