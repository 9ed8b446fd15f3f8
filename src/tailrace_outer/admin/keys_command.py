"""`tailrace keys`: create, show and revoke the keys of a server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli.config_file import file_options
from tailrace.cli.console import print_json, print_table, say
from tailrace.settings import Settings
from tailrace_outer.admin.limit_options import describe_quota, quota_options, quota_with
from tailrace_outer.admin.times import Duration, date_of
from tailrace_outer.client.servers import default_url, server_failures, server_options

if TYPE_CHECKING:
    from tailrace.access.audit import AuditLog
    from tailrace.access.keys import Key, NewKey
    from tailrace.access.quota import Quota
    from tailrace.records.key_store import KeyStore

__all__ = ["keys"]


@click.group()
def keys() -> None:
    """Create, show and revoke keys.

    When the first key exists, every request needs a key: Authorization: Bearer tr_…, or x-api-key. A running server
    sees changes within a second. When a key is revoked, its streams end.

    \b
    tailrace keys create alice
    tailrace keys create ci --scope generate --scope model:smollm2 --expires 30d
    tailrace keys create bob --tokens-per-minute 20000 --streams-at-once 4
    tailrace keys limit KEY_ID --tokens-per-month 5000000
    tailrace keys limit --owner bob --requests-per-minute 60
    tailrace keys list
    tailrace keys rotate KEY_ID --grace 1d
    tailrace keys revoke KEY_ID
    tailrace keys forget alice
    """


_where = file_options("database", "data_dir", "audit_log")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@keys.command()
@click.argument("owner")
@click.option("--name", default="", help="A label, to distinguish the owner's keys.")
@click.option(
    "--scope", "scopes", multiple=True,
    help="What the key may do: generate, read, admin, metrics; wire:NAME and model:NAME restrict it to these. May be "
    "repeated. Default: generate and read.",
)  # fmt: skip
@click.option(
    "--expires", type=Duration(), help="How long the key is valid, such as 90d. By default, until it is revoked."
)
@quota_options
@_as_json
@_where
def create(
    owner: str, name: str, scopes: Sequence[str], expires: float | None, as_json: bool, **values: Any
) -> None:  # Any: click hands over what the tables describe
    """Create a key for OWNER, and print it. It is shown only once: the server stores only its hash.

    All keys of an owner see the same streams. Streams of other owners are invisible.
    """
    from tailrace.access.keys import DEFAULT_SCOPES

    if expires == 0:
        raise click.BadParameter("a key must be valid for some time.", param_hint="--expires")
    quota, values = _split(values)
    with _store(values, may_create=True) as (store, audit):
        made = store.create(
            owner, name=name, scopes=tuple(scopes) or DEFAULT_SCOPES, lifetime_s=expires, quota=quota_with(quota)
        )
        audit.add_command("key.create", made.key)
    _show_new(made, as_json)


@keys.command(name="list")
@click.option("--owner", help="Only keys of this owner.")
@_as_json
@_where
def list_(owner: str | None, as_json: bool, **values: Any) -> None:  # Any: as above
    """List the keys, newest first, with the limits of keys and owners."""
    from tailrace.access.quota import NO_LIMITS

    found: Sequence[Key] = ()
    quotas: dict[str, Quota] = {}
    with contextlib.suppress(_NoDatabase), _store(values) as (store, _):
        found = store.list(owner)
        quotas = {name: store.quota_of(name) for name in sorted({key.owner for key in found})}
    if as_json:
        print_json([_json_of(key) for key in found])
        return
    if not found:
        say("There are no keys." if owner is None else "This owner has no keys.")
        return
    now_s = time.time()
    rows = [
        (key.key_id, key.owner, key.name, " ".join(key.scopes), date_of(key.created_s) or "",
         date_of(key.expires_s) or "", key.state(now_s), "" if key.quota == NO_LIMITS else describe_quota(key.quota))
        for key in found
    ]  # fmt: skip
    print_table(("id", "owner", "name", "scopes", "created", "expires", "state", "limits"), rows)
    for name, quota in quotas.items():
        if quota != NO_LIMITS:
            say(f"Owner {name}, with all keys together: {describe_quota(quota)}.")


@keys.command()
@click.argument("key_id")
@_as_json
@_where
def show(key_id: str, as_json: bool, **values: Any) -> None:  # Any: as above
    """Show one key: its owner, scopes and state."""
    with _store(values) as (store, _):
        _show(store.get(_id_in(key_id)), as_json)


@keys.command()
@click.argument("key_id", required=False)
@click.option("--owner", help="Limit all keys of this owner together.")
@quota_options
@_as_json
@_where
def limit(key_id: str | None, owner: str | None, as_json: bool, **values: Any) -> None:  # Any: as above
    """Change the limits of a key, or of an owner with all keys together. Limits that are not given stay unchanged.

    Tokens of prompts and answers count. A request reserves its prompt and its longest answer (max_tokens) when it
    begins. At its end, the tokens that it did not use are released.
    """
    if (key_id is None) == (owner is None):
        raise click.UsageError("Give either a key's id or --owner.")
    quota, values = _split(values)
    with _store(values, may_create=owner is not None) as (store, audit):
        if owner is not None:
            changed = store.limit_owner(owner, quota_with(quota, store.quota_of(owner)))
            audit.add_command("owner.limit", of_owner=owner)
            if as_json:
                print_json({"owner": owner, "quota": changed})
            else:
                say(f"Owner {owner}: {describe_quota(changed)}.")
        else:
            key = store.get(_id_in(key_id or ""))
            limited = store.limit(key.key_id, quota_with(quota, key.quota))
            audit.add_command("key.limit", limited)
            _show(limited, as_json)


@keys.command()
@click.argument("key_id")
@_as_json
@_where
def revoke(key_id: str, as_json: bool, **values: Any) -> None:  # Any: as above
    """Revoke a key, and end the streams that were begun with it."""
    with _store(values) as (store, audit):
        revoked = store.revoke(_id_in(key_id))
        audit.add_command("key.revoke", revoked)
    _show(revoked, as_json)


@keys.command()
@click.argument("key_id")
@click.option("--grace", type=Duration(), default="1d", show_default=True, help="How long the old secret stays valid.")
@_as_json
@_where
def rotate(key_id: str, grace: float, as_json: bool, **values: Any) -> None:  # Any: as above
    """Give a key a new secret, and print it. The key keeps its id, owner and scopes."""
    with _store(values) as (store, audit):
        made = store.rotate(_id_in(key_id), grace_s=grace)
        audit.add_command("key.rotate", made.key)
    _show_new(made, as_json)


@keys.command()
@click.argument("owner")
@click.option("--yes", "-y", is_flag=True, help="Delete without asking.")
@_as_json
@server_options
def forget(owner: str, yes: bool, as_json: bool, url: str | None, key: str) -> None:
    """Delete all data of OWNER on a server: keys, streams, conversations, records.

    The server must run, and the key must have the scope admin. Prints how many of each were deleted. An audit log keeps
    its lines.
    """
    import asyncio
    from urllib.parse import quote

    from tailrace_outer.client.connection import connect

    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("stdin is not a terminal. Use --yes to delete without asking.")
        click.confirm(f"Delete all keys, streams, conversations and requests of {owner}?", abort=True, err=True)

    async def ask() -> dict[str, Any]:  # Any: what JSON can be
        async with connect(url or default_url(), key) as client:
            client.require_tailrace()
            return await client.delete(f"/v1/admin/owners/{quote(owner, safe='')}")

    with server_failures():
        deleted = asyncio.run(ask())["deleted"]
    if as_json:
        print_json({"owner": owner, "deleted": deleted})
    else:
        counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in deleted.items())
        say(f"Forgot {owner}: {counts}." if any(deleted.values()) else f"There is no data of {owner}.")


class _NoDatabase(click.ClickException):
    """There is no database, so there are no keys."""


@contextlib.contextmanager
def _store(
    values: dict[str, Any], *, may_create: bool = False
) -> Iterator[tuple[KeyStore, AuditLog]]:  # Any: of each setting's type
    """Open the keys in the database of the options, and the audit log. Converts their errors to errors of the command
    line. Looking for a key creates no database, because servers record requests as soon as there is one."""
    from tailrace.access.audit import open_audit_log
    from tailrace.errors import ModelError, StorageError, UnknownKey
    from tailrace.records.key_store import KeyStore
    from tailrace.records.records_service import absent_database, open_database

    try:
        settings = Settings(**values)
        if not may_create and (path := absent_database(settings)) is not None:
            raise _NoDatabase(f"There are no keys: there is no database at {path}.")
        with open_audit_log(settings) as audit, contextlib.closing(open_database(settings)) as database:
            yield KeyStore(database), audit
    except (ModelError, StorageError, UnknownKey) as error:
        raise click.ClickException(error.message) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:  # Any: of each option's type
    """Split options into limits and settings."""
    from tailrace.access.quota import Quota

    limits = {name: values.pop(name) for name in Quota.__struct_fields__}
    return limits, values


def _id_in(text: str) -> str:
    """Return a key's id. Also accepts a whole key."""
    from tailrace.access.keys import split_token

    token = split_token(text)
    return token[0] if token else text


def _show_new(made: NewKey, as_json: bool) -> None:
    if as_json:
        print_json({**_json_of(made.key), "token": made.token})
        return
    say(f"Key {made.key.key_id} of {made.key.owner} ({' '.join(made.key.scopes)}). It is shown only once:")
    click.echo(made.token)


def _show(key: Key, as_json: bool) -> None:
    if as_json:
        print_json(_json_of(key))
        return
    for name, value in {**_json_of(key), "quota": describe_quota(key.quota)}.items():
        click.echo(f"{name:<22}{' '.join(value) if isinstance(value, tuple) else value if value is not None else '-'}")


def _json_of(key: Key) -> dict[str, Any]:  # Any: of each field's type
    return {
        "id": key.key_id,
        "owner": key.owner,
        "name": key.name,
        "scopes": key.scopes,
        "created": date_of(key.created_s),
        "expires": date_of(key.expires_s),
        "revoked": date_of(key.revoked_s),
        "old_secret_expires": date_of(key.old_expires_s),
        "state": key.state(time.time()),
        "quota": key.quota,
    }
