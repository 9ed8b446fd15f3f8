"""`tailrace keys`: make, show and end the keys of a server."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tailrace.cli.console import print_json, say
from tailrace.cli.options import setting_options
from tailrace.settings import Settings

if TYPE_CHECKING:
    from tailrace.access.keys import Key, NewKey
    from tailrace.records.keys import KeyStore

__all__ = ["keys"]

_DAY_S = 86_400.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": _DAY_S, "w": 7 * _DAY_S, "y": 365 * _DAY_S}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdwy])")


class _Duration(click.ParamType[float]):
    """A number with a unit, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # Any: click's
        if isinstance(value, float):
            return value
        found = _DURATION.fullmatch(value)
        if found is None or not 0 <= float(found[1]) * _UNITS_S[found[2]] <= 100 * _UNITS_S["y"]:
            self.fail(f"{value!r} is not a duration such as 90d, 12h, 30m or 0s.", param, ctx)
        return float(found[1]) * _UNITS_S[found[2]]


@click.group()
def keys() -> None:
    """Make, show and end keys.

    As soon as there is one key, every request needs one: Authorization: Bearer tr_…, or x-api-key. A server that runs
    sees a change within a second. Streams that were begun with a key end when it is revoked.

    \b
    tailrace keys create alice
    tailrace keys create ci --scope generate --scope model:smollm2 --expires 30d
    tailrace keys list
    tailrace keys rotate KEY_ID --grace 1d
    tailrace keys revoke KEY_ID
    """


_where = setting_options("database", "data_dir")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@keys.command()
@click.argument("owner")
@click.option("--name", default="", help="What the key is for, to tell it from others of the owner.")
@click.option(
    "--scope", "scopes", multiple=True,
    help="What the key may do: generate, read, admin, metrics; wire:NAME and model:NAME limit it to these. May be "
    "given again; without it generate and read.",
)  # fmt: skip
@click.option(
    "--expires", type=_Duration(), help="How long the key works, such as 90d. Without it, until it is revoked."
)
@_as_json
@_where
def create(
    owner: str, name: str, scopes: Sequence[str], expires: float | None, as_json: bool, **values: Any
) -> None:  # Any: click hands over what the table describes
    """Make a key for OWNER, and print it. It is shown once: only its hash is kept.

    All keys of an owner see the same streams. Another owner's are not there for them.
    """
    from tailrace.access.keys import DEFAULT_SCOPES

    with _store(values) as store:
        made = store.create(owner, name=name, scopes=tuple(scopes) or DEFAULT_SCOPES, lifetime_s=expires)
    _show_new(made, as_json)


@keys.command(name="list")
@click.option("--owner", help="Only this owner's.")
@_as_json
@_where
def list_(owner: str | None, as_json: bool, **values: Any) -> None:  # Any: as above
    """List the keys, the newest first."""
    with _store(values) as store:
        found = store.list(owner)
    if as_json:
        print_json([_json_of(key) for key in found])
        return
    if not found:
        say("There are no keys." if owner is None else "This owner has no keys.")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "owner", "name", "scopes", "created", "expires", "state", box=None)
    now_s = time.time()
    for key in found:
        table.add_row(
            key.key_id, key.owner, key.name, " ".join(key.scopes), _date(key.created_s), _date(key.expires_s),
            key.state(now_s),
        )  # fmt: skip
    Console().print(table)


@keys.command()
@click.argument("key_id")
@_as_json
@_where
def show(key_id: str, as_json: bool, **values: Any) -> None:  # Any: as above
    """Show one key: whose it is, what it may do, whether it works."""
    with _store(values) as store:
        _show(store.get(_id_in(key_id)), as_json)


@keys.command()
@click.argument("key_id")
@_as_json
@_where
def revoke(key_id: str, as_json: bool, **values: Any) -> None:  # Any: as above
    """End a key, and the streams that were begun with it."""
    with _store(values) as store:
        _show(store.revoke(_id_in(key_id)), as_json)


@keys.command()
@click.argument("key_id")
@click.option(
    "--grace", type=_Duration(), default="1d", show_default=True, help="How long the secret before works as well."
)
@_as_json
@_where
def rotate(key_id: str, grace: float, as_json: bool, **values: Any) -> None:  # Any: as above
    """Give a key a new secret, and print it. The key keeps its id, owner and scopes."""
    with _store(values) as store:
        _show_new(store.rotate(_id_in(key_id), grace_s=grace), as_json)


@contextlib.contextmanager
def _store(values: dict[str, Any]) -> Iterator[KeyStore]:  # Any: of each setting's type
    """The keys in the database that the options name. Errors of it are the command line's."""
    from tailrace.errors import ModelError, StorageError, UnknownKey
    from tailrace.records.keys import KeyStore
    from tailrace.records.service import open_database

    try:
        with contextlib.closing(open_database(Settings(**values))) as database:
            yield KeyStore(database)
    except (ModelError, StorageError, UnknownKey) as error:
        raise click.ClickException(error.message) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _id_in(text: str) -> str:
    """A key's id; whoever gives the whole key means its id."""
    from tailrace.access.keys import split_token

    token = split_token(text)
    return token[0] if token else text


def _show_new(made: NewKey, as_json: bool) -> None:
    if as_json:
        print_json({**_json_of(made.key), "token": made.token})
        return
    say(f"Key {made.key.key_id} of {made.key.owner} ({' '.join(made.key.scopes)}). It is shown this once:")
    click.echo(made.token)


def _show(key: Key, as_json: bool) -> None:
    if as_json:
        print_json(_json_of(key))
        return
    for name, value in _json_of(key).items():
        click.echo(f"{name:<22}{' '.join(value) if isinstance(value, tuple) else value if value is not None else '-'}")


def _json_of(key: Key) -> dict[str, Any]:  # Any: of each field's type
    return {
        "id": key.key_id,
        "owner": key.owner,
        "name": key.name,
        "scopes": key.scopes,
        "created": _date(key.created_s),
        "expires": _date(key.expires_s),
        "revoked": _date(key.revoked_s),
        "old_secret_expires": _date(key.old_expires_s),
        "state": key.state(time.time()),
    }


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
