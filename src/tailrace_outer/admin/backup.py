"""`tailrace backup` and `tailrace restore`: the data directory in one file."""

from __future__ import annotations

from pathlib import Path

import click

from tailrace.cli.config_file import file_options
from tailrace.cli.console import say, size_text

__all__ = ["backup", "restore"]

_data_dir = file_options("data_dir")


@click.command()
@click.argument("archive", type=click.Path(path_type=Path))
@_data_dir
def backup(archive: Path, data_dir: str) -> None:
    """Copy the data directory to a new file ARCHIVE (.tar.gz), also while servers use it.

    It has the journals of all servers in the directory, keys, usage, conversations and stored images: everything that
    cannot be downloaded again. Each database is copied as it is at one moment. The file is as secret as the directory,
    and only its owner can read it. A database in --database and streams in Redis are not in it.

    \b
    tailrace backup monday.tar.gz
    tailrace restore monday.tar.gz --data-dir ./restored
    """
    from tailrace_outer.admin.data_copies import BackupFailed, write_backup

    try:
        written = write_backup(_directory(data_dir), archive)
    except BackupFailed as error:
        raise click.ClickException(str(error)) from None
    _tell(written, f"are in {archive}, which has {size_text(archive.stat().st_size)}")


@click.command()
@click.argument("archive", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@_data_dir
def restore(archive: Path, data_dir: str) -> None:
    """Make a data directory of a backup. The directory must not exist, or be empty: nothing is overwritten.

    A server that starts there continues the streams that were unfinished when the backup was made.
    """
    from tailrace_outer.admin.data_copies import BackupFailed, restore_backup

    directory = _directory(data_dir)
    try:
        restored = restore_backup(archive, directory)
    except BackupFailed as error:
        raise click.ClickException(str(error)) from None
    _tell(restored, f"are in {directory}")


def _directory(data_dir: str) -> Path:
    from tailrace.models.directories import data_path, expanded

    return expanded(data_dir) if data_dir else data_path()


def _tell(files: list[tuple[str, int]], where: str) -> None:
    many = "1 file" if len(files) == 1 else f"{len(files)} files"
    say(f"{many} with {size_text(sum(size for _, size in files))} {where}.")
