import click

from tailrace.cli.commands import ModelArguments, ServePlace, say
from tailrace.server import Settings

TIMES = click.Option(["--times"], type=click.IntRange(1), default=1, help="How often the parrot says it.")
PLACE = ServePlace("parrot", "with a parrot, which only says where", "tailrace_parrot.place:serve", (TIMES,))


def serve(models: ModelArguments, settings: Settings, *, times: int) -> int:
    if models.named:
        raise ValueError("the parrot knows one model.")
    for _ in range(times):
        say(f"{models.first} on port {settings.port}")
    return 0
