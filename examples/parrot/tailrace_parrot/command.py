import click

from tailrace.cli.commands import default_url, server_failures, server_options


@click.command(short_help="Say something to the parrot of a server.")
@click.argument("words", nargs=-1, required=True)
@server_options
def parrot(words: tuple[str, ...], url: str | None, key: str) -> None:
    """Say WORDS to the parrot of a server, and print what it says."""
    import asyncio

    with server_failures():
        asyncio.run(_say(" ".join(words), url or default_url(), key))


async def _say(text: str, url: str, key: str) -> None:
    from tailrace.client import connect

    async with connect(url, key) as client:
        async for piece in client.answer(client.models[0], [{"role": "user", "content": text}], {"max_tokens": 8}):
            click.echo(piece, nl=False)
    click.echo()
