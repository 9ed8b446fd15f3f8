"""Models of the Hugging Face hub, through its own library: its cache, its token, its resuming, its settings.

Files are asked for one by one, so that one bar tells of each. Without a network, what is in the cache is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from tailrace.errors import ModelError
from tailrace.models._directory_card import EXPORT_FILES
from tailrace.models.catalogue import HubSource
from tailrace.models.progress import Progress

__all__ = ["fetch_from_hub"]

# Of a repository: all that an engine or a card reads, and not the weights of other formats beside it.
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
_OF_EXPORT: tuple[str, ...] = ("openvino_*.xml", "openvino_*.bin", *_BESIDE)
_OF_MODEL: tuple[str, ...] = ("*.safetensors", *_BESIDE)
_MAX_LISTED = 12


@dataclass(frozen=True, slots=True)
class _Repository:
    """What is known of one, and the way to its files."""

    name: str
    files: list[str]
    is_online: bool  # otherwise the cache alone is asked, so that nobody waits for the hub once for each file

    def fetch(self, file: str, progress: Progress, *, revision: str | None = None) -> Path:
        from huggingface_hub import hf_hub_download

        # The library asks for a subclass of tqdm but uses what `_bar` has; a bar of theirs would draw on our terminal.
        bar = _bar(file, progress)
        is_cached = not self.is_online
        return Path(hf_hub_download(self.name, file, revision=revision, tqdm_class=bar, local_files_only=is_cached))


def fetch_from_hub(source: HubSource, progress: Progress) -> Path:
    """The GGUF file, or the directory of the OpenVINO export or the model, in the hub's own cache.

    *Cancellation:* the hub's library keeps what it has and goes on from there next time. *Raises:* ModelError.
    """
    with _hub_errors(source):
        repo = _look_at(source.repo, source.file)
        if source.file is not None:
            return repo.fetch(source.file, progress)
        if EXPORT_FILES[0] in repo.files:
            first, wanted = EXPORT_FILES[0], _OF_EXPORT
        elif "config.json" in repo.files and any(fnmatch(file, "*.safetensors") for file in repo.files):
            first, wanted = "config.json", _OF_MODEL
        else:
            return repo.fetch(_only_gguf(source.repo, repo.files), progress)
        # The first by branch, so that the cache knows later, without a network, what the branch was. The others by the
        # commit that this gave, so that all are of one version and in one directory, also when a push comes in between.
        directory = repo.fetch(first, progress).parent
        for file in repo.files:
            if "/" not in file and any(fnmatch(file, kind) for kind in wanted):
                repo.fetch(file, progress, revision=directory.name)
        return directory


def _look_at(name: str, wanted: str | None) -> _Repository:
    """As it is at the newest commit; when the hub cannot be asked, as the cache has it, if what is `wanted` is there.

    A single file is looked for in this way too, since it says soon that the hub does not answer. The library's download
    of a file that the cache lacks tries six times, with pauses of 23 s together and two lines in the log for each.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    try:
        siblings = HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT).siblings or []
    except (errors.OfflineModeIsEnabled, errors.HTTPError) as error:  # type: ignore[attr-defined]  # their client's
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
            raise
        try:
            cached = Path(snapshot_download(name, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            raise error from None
        files = [path.relative_to(cached).as_posix() for path in cached.rglob("*") if path.is_file()]
        if wanted is not None and wanted not in files:
            raise
        return _Repository(name, files, is_online=False)
    return _Repository(name, [sibling.rfilename for sibling in siblings], is_online=True)


def _only_gguf(repo: str, files: list[str]) -> str:
    choices = sorted(file for file in files if PurePosixPath(file).suffix == ".gguf")
    if len(choices) == 1:
        return choices[0]
    if not choices:
        raise ModelError(
            f"hf:{repo} holds no model that can be run: no GGUF file, no OpenVINO export ({EXPORT_FILES[0]}), no "
            "safetensors with a config.json. Pick a repository that has one of them."
        )
    listed = ", ".join(choices[:_MAX_LISTED])
    more = f" and {len(choices) - _MAX_LISTED} more" if len(choices) > _MAX_LISTED else ""
    raise ModelError(f"hf:{repo} holds {len(choices)} GGUF files. Pick one as hf:{repo}:FILE, of {listed}{more}.")


def _bar(file: str, progress: Progress) -> type[object]:
    """A class that hf_hub_download makes its bar from, telling `progress`. It is made only when bytes are to come."""

    class Bar:
        def __init__(self, *, total: float | None = None, initial: float = 0, **_: object) -> None:
            self.total = total
            self.n = initial
            self._open = True
            progress.start(f"Fetching {file}", None if total is None else int(total))
            if initial:
                progress.advance(int(initial))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def update(self, num_bytes: float | None = 1) -> None:
            self.n += num_bytes or 0
            progress.advance(int(num_bytes or 0))

        def close(self) -> None:
            if self._open:
                self._open = False
                progress.done()

        # Xet downloads count bytes on the wire too, and write the rate behind the bar. One count is enough.
        def update_transfer(self, num_bytes: float | None = 1) -> None: ...

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

        def refresh(self, *_: object, **__: object) -> None: ...

    return Bar


@contextmanager
def _hub_errors(source: HubSource) -> Iterator[None]:
    """The one place where what the library raises becomes a ModelError. The order is from the narrow to the wide."""
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    # Its own handler writes each line a second time where the process shows its log.
    logging.get_logger().handlers.clear()
    repo = f"hf:{source.repo}"
    log_in = "set HF_TOKEN, or run `hf auth login`"
    try:
        yield
    except errors.GatedRepoError as error:
        message = f"{repo} is gated: ask for access on its page, then {log_in} with an account that has it."
        raise ModelError(message) from error
    except errors.RepositoryNotFoundError as error:
        message = f"The hub has no {repo}, or it is private. Check the spelling; if it is private, {log_in}."
        raise ModelError(message) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(_unreachable(repo)) from error
    except errors.EntryNotFoundError as error:
        raise ModelError(f"{repo} has no file `{source.file}`. Leave the file out to see what it has.") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{repo} is not a name that the hub allows. Check the spelling.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        remedy = f"If the model needs an account, {log_in}." if status in (401, 403) else "Try again in a while."
        raise ModelError(f"The hub answered HTTP {status} for {repo}. {remedy}") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # of their HTTP client, which changed under it
        raise ModelError(_unreachable(repo)) from error
    except OSError as error:
        raise ModelError(f"{repo} could not be stored: {error}. Check the disk; HF_HOME moves the cache.") from error


def _unreachable(repo: str) -> str:
    return (
        f"{repo} is not on this machine and the hub could not be reached. Check the network (and HF_HUB_OFFLINE, "
        "HF_ENDPOINT, HTTPS_PROXY), or give the path of a model on disk."
    )
