"""The commands of this layer, as `tailrace --help` shows them. Their modules are imported when they are called."""

from __future__ import annotations

from tailrace.cli.late import LateCommand

__all__ = [
    "BACKUP", "BENCH", "CERTIFY", "DEMO", "DOCTOR", "KEYS", "LS", "RESTORE", "RM", "RUN", "SHARE", "USAGE",
]  # fmt: skip

BACKUP = LateCommand(
    "backup", "Copy the data directory to a file, also while servers use it.", "tailrace_outer.admin.backup:backup"
)
BENCH = LateCommand(
    "bench", "Measure what the server adds to the engine.", "tailrace_outer.measure.bench_command:bench"
)
CERTIFY = LateCommand(
    "certify",
    "Measure how exactly the engine repeats itself after a crash.",
    "tailrace_outer.measure.certify_command:certify",
)
DEMO = LateCommand(
    "demo", "Show on a page how streaming works, and which failures it survives.", "tailrace_outer.demo.command:demo"
)
DOCTOR = LateCommand(
    "doctor", "Check this machine, its engines, and how fast a model could be.", "tailrace_outer.measure.doctor:doctor"
)
KEYS = LateCommand("keys", "Create, show and revoke the keys of a server.", "tailrace_outer.admin.keys_command:keys")
LS = LateCommand("ls", "List the models on this machine.", "tailrace_outer.measure.ls:ls")
RESTORE = LateCommand("restore", "Make a data directory of a backup.", "tailrace_outer.admin.backup:restore")
RM = LateCommand("rm", "Delete downloaded models.", "tailrace_outer.measure.rm:rm")
RUN = LateCommand("run", "Serve your own code: an app, a folder or a YAML file.", "tailrace_outer.apps.command:run")
SHARE = LateCommand(
    "share", "Make a link that shows a conversation or a stream to others.", "tailrace_outer.admin.share:share"
)
USAGE = LateCommand(
    "usage", "Show how many requests and tokens were used, and by whom.", "tailrace_outer.admin.usage:usage"
)
