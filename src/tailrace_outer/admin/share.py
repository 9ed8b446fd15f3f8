"""`tailrace share`: links that show a conversation or a stream to whoever has them."""

from __future__ import annotations

import click

from tailrace.cli.console import print_table, say
from tailrace.wording import printable_text
from tailrace_outer.admin.times import Duration, date_of
from tailrace_outer.client.servers import default_url, server_failures, server_options

__all__ = ["share"]


@click.command()
@click.argument("shown", metavar="[ID]", default="")
@click.option(
    "--expires", "lifetime_s", type=Duration(), default="7d", show_default=True, help="When it ends, such as 1h or 30d."
)
@click.option("--list", "is_list", is_flag=True, help="List your links.")
@click.option(
    "--revoke", "revoked", metavar="LINK", help="Revoke a link: by its id, or the whole link. Its readers are cut off."
)
@server_options
def share(shown: str, lifetime_s: float, *, is_list: bool, revoked: str | None, url: str | None, key: str) -> None:
    """Make a link that shows a conversation or a stream, live, to whoever has it.

    ID is that of a conversation (conv_…), of a stream, or of a response (resp_…). Of a response with MCP tools, share
    the conversation. The link shows no names and allows nothing else. It ends when it is revoked, when it expires, and
    with the key that made it.

    \b
    tailrace share conv_4f1c… --expires 1d
    tailrace share --list
    tailrace share --revoke 7f0a2b…
    """
    import asyncio

    if sum((bool(shown), is_list, revoked is not None)) != 1:
        raise click.UsageError("Give an ID, --list or --revoke.")
    root = (url or default_url()).rstrip("/")
    with server_failures():
        asyncio.run(_share(root, key, shown, lifetime_s, revoked))


async def _share(root: str, key: str, shown: str, lifetime_s: float, revoked: str | None) -> None:
    from tailrace_outer.client.connection import connect

    async with connect(root, key) as client:
        if revoked is not None:
            share_id = revoked.rpartition("#")[2].removeprefix("trs_").partition("_")[0]
            await client.delete(f"/v1/shares/{share_id}")
            say("Revoked.")
        elif shown:
            kind = "conversation_id" if shown.startswith("conv_") else "stream_id"
            made = await client.post("/v1/shares", {kind: shown, "expires_in_s": lifetime_s})
            say(_link(root, made["path"]))
        else:
            found = (await client.get("/v1/shares"))["data"]
            rows = [
                (
                    printable_text(one["id"]),
                    printable_text(str(one.get("conversation_id") or one.get("stream_id"))),
                    str(date_of(one["expires_at"])),
                    _link(root, one["path"]),
                )
                for one in found
            ]
            print_table(("id", "shows", "until", "link"), rows)


def _link(root: str, path: str) -> str:
    """The server's path may lack what a proxy put before it; the URL has it."""
    return printable_text(f"{root}/share#{path.partition('#')[2]}")
