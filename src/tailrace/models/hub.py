"""Downloads models of the Hugging Face hub with the hub's library, with its cache, token, settings and resumption.

Files are downloaded one by one, each with its own progress bar, and checked against the hash that the hub states for
large files. Without a network, it uses the cache.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from tailrace.errors import ModelError
from tailrace.models._directory_card import EXPORT_FILES
from tailrace.models._large_file import download, num_missing_bytes
from tailrace.models.catalogue import HubSource
from tailrace.models.progress import Progress
from tailrace.models.safetensors import chosen_files
from tailrace.models.shards import gguf_choices, model_stem, part_names, projector_of, some_of

__all__ = ["fetch_from_hub"]

_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")  # the files that an engine or a card reads beside the weights


@dataclass(frozen=True, slots=True)
class _Repository:
    """A repository, and the download of its files."""

    name: str
    files: list[str]
    is_online: bool  # if not, use only the cache, to avoid a timeout for each file
    sizes: dict[str, int] = field(default_factory=dict)  # as far as the hub states them
    hashes: dict[str, str] = field(default_factory=dict)  # SHA-256 of large files

    def fetch(self, file: str, progress: Progress, *, revision: str | None = None) -> Path:
        from huggingface_hub import hf_hub_download

        if self.is_online and file in self.hashes:
            self._fetch_large(file, revision, progress)
        # The library expects a subclass of tqdm, but only uses the methods of `_bar`. tqdm would draw on the terminal.
        bar = _bar(file, progress)
        is_cached = not self.is_online
        return Path(hf_hub_download(self.name, file, revision=revision, tqdm_class=bar, local_files_only=is_cached))

    def _fetch_large(self, file: str, revision: str | None, progress: Progress) -> None:
        """Download a file into the library's cache, where the library then finds it."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.name, file, revision=revision)
        download(url, self._blob(file), self.sizes[file], self.hashes[file], progress)

    def _blob(self, file: str) -> Path:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE, f"models--{self.name.replace('/', '--')}", "blobs", self.hashes[file])

    def require_space(self, files: Iterable[str]) -> None:
        """Raises: ModelError if the disk of the cache has no room for what is missing of the files."""
        from huggingface_hub import constants, try_to_load_from_cache

        missing = [file for file in files if not isinstance(try_to_load_from_cache(self.name, file), str)]
        sizes = {file: self.sizes.get(file, 0) for file in missing}
        needed_bytes = sum(
            num_missing_bytes(self._blob(file), size) if file in self.hashes else size for file, size in sizes.items()
        )
        cache = Path(constants.HF_HUB_CACHE)
        existing = next((path for path in (cache, *cache.parents) if path.is_dir()), None)
        free_bytes = shutil.disk_usage(existing).free if existing is not None else needed_bytes
        if free_bytes < needed_bytes:
            raise ModelError(
                f"hf:{self.name} needs {needed_bytes / 1e9:.1f} GB more and {cache} has {free_bytes / 1e9:.1f} GB "
                "free. Free some space, or set HF_HOME to a directory on another disk."
            )


def fetch_from_hub(source: HubSource, progress: Progress) -> Path:
    """Download a model. Returns the GGUF file, or the directory of the export or model, in the hub's cache.

    *Cancellation:* large files continue next time where they were. *Raises:* ModelError.
    """
    _require_cache()
    with _hub_errors(source):
        repo = _look_at(source.repo, source.file)
        if source.file is not None:
            return _fetch_gguf(repo, _chosen(source, source.file, repo.files), progress)
        if EXPORT_FILES[0] in repo.files:
            return _fetch_directory(repo, EXPORT_FILES[0], lambda _: EXPORT_FILES, progress)
        weights = [file for file in repo.files if "/" not in file and file.endswith(".safetensors")]
        if "config.json" in repo.files and weights:
            return _fetch_directory(repo, "config.json", lambda directory: chosen_files(directory, weights), progress)
        return _fetch_gguf(repo, _only_gguf(source.repo, repo.files), progress)


def _require_cache() -> None:
    """Raises: ModelError if the hub's library would make a directory named `~`."""
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):
        raise ModelError("This user has no home directory. Set HOME or HF_HOME to use models of the hub.")


def _look_at(name: str, wanted: str | None) -> _Repository:
    """Return the repository at its newest commit, or from the cache if the hub cannot be reached and `wanted` is there.

    Also used for a single file, because it quickly detects that the hub does not answer. The library's download of a
    missing file retries six times, with pauses of 23 s in total and two log lines each.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    try:
        found = HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT, files_metadata=True).siblings or []
    except (errors.OfflineModeIsEnabled, errors.HTTPError) as error:  # type: ignore[attr-defined]  # their client's
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
            raise
        try:
            cached = Path(snapshot_download(name, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            raise error from None
        files = [path.relative_to(cached).as_posix() for path in cached.rglob("*") if path.is_file()]
        if wanted is not None and not _matching(wanted, files):
            raise
        return _Repository(name, files, is_online=False)
    return _Repository(
        name,
        [one.rfilename for one in found],
        is_online=True,
        sizes={one.rfilename: one.size for one in found if one.size},
        hashes={one.rfilename: one.lfs.sha256 for one in found if one.lfs is not None and one.size},
    )


def _matching(wanted: str, files: list[str]) -> list[str]:
    """Return the files that `wanted` means: a file, also in another case, since uploaders rename files so; or the GGUF
    models with this type of weights, such as Q4_K_M."""
    if wanted in files:
        return [wanted]
    if wanted.endswith(".gguf"):
        return [file for file in files if file.lower() == wanted.lower()]
    ending = re.compile(rf"(^|[-.]){re.escape(wanted)}", re.IGNORECASE)
    stems = {file: model_stem(PurePosixPath(file)) for file in gguf_choices(files)}
    return [file for file, stem in stems.items() if (at := ending.search(stem)) and at.end() == len(stem)]


def _chosen(source: HubSource, wanted: str, files: list[str]) -> str:
    """Return the one file that `wanted` means. Raises: ModelError."""
    found = _matching(wanted, files)
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"hf:{source.repo} has several files of {wanted}. Name one of them: {some_of(found)}.")
    raise ModelError(f"hf:{source.repo} has no file `{wanted}`. Leave the file out to see what it has.")


def _only_gguf(repo: str, files: list[str]) -> str:
    choices = gguf_choices(files)
    if len(choices) == 1:
        return choices[0]
    if not choices:
        raise ModelError(
            f"hf:{repo} contains no supported model: no GGUF file, no OpenVINO export ({EXPORT_FILES[0]}), no "
            "safetensors with a config.json. Pick a repository that has one of them."
        )
    raise ModelError(
        f"hf:{repo} contains {len(choices)} GGUF models. Choose one with hf:{repo}:FILE, from {some_of(choices)}."
    )


def _fetch_directory(
    repo: _Repository, first: str, find_weights: Callable[[Path], Iterable[str]], progress: Progress
) -> Path:
    """Download a directory without weights in other formats. `find_weights` gets the directory when it has all else.

    The first file is fetched by branch, so that the cache records the branch's commit for use without a network. The
    others by that commit, so that all are of one version and in one directory even if somebody pushes in between.
    """
    directory = repo.fetch(first, progress).parent
    beside = [file for file in repo.files if "/" not in file and any(fnmatch(file, kind) for kind in _BESIDE)]
    for file in beside:
        repo.fetch(file, progress, revision=directory.name)
    weights = list(find_weights(directory))
    repo.require_space(weights)
    for file in weights:
        repo.fetch(file, progress, revision=directory.name)
    return directory


def _fetch_gguf(repo: _Repository, file: str, progress: Progress) -> Path:
    """Download a GGUF file, or all parts of a model, and its projector if there is one. Returns the first file. Raises:
    ModelError."""
    first, *others = part_names(file)
    if file != first:
        raise ModelError(f"`{file}` is only one part of a model. Name its first part, {first}.")
    if missing := [part for part in others if part not in repo.files]:
        raise ModelError(f"hf:{repo.name} lacks parts of this model: {some_of(missing)}.")
    projector = projector_of(first, repo.files)
    beside = [*others, projector] if projector else others
    repo.require_space([first, *beside])
    path = repo.fetch(first, progress)
    commit = path.parents[len(PurePosixPath(first).parts) - 1].name  # all parts are of one commit, in one directory
    for part in beside:
        repo.fetch(part, progress, revision=commit)
    return path


def _bar(file: str, progress: Progress) -> type[object]:
    """Return a bar class for hf_hub_download that reports to `progress`. Instances exist only during a download."""

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

        # Xet downloads also count bytes on the wire and print the rate. One count is enough.
        def update_transfer(self, num_bytes: float | None = 1) -> None: ...

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

        def refresh(self, *_: object, **__: object) -> None: ...

    return Bar


@contextmanager
def _hub_errors(source: HubSource) -> Iterator[None]:
    """Convert the library's exceptions to ModelError. The order is from specific to general."""
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    # The library's own handler would duplicate each line of the process's log.
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
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # of the library's HTTP client, which differs between versions
        raise ModelError(_unreachable(repo)) from error
    except OSError as error:
        raise ModelError(f"{repo} could not be stored: {error}. Check the disk; HF_HOME moves the cache.") from error


def _unreachable(repo: str) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"{repo} is not on this machine, and HF_HUB_OFFLINE is set: nothing is fetched. Fetch it with a network."
    return (
        f"{repo} is not on this machine and {constants.ENDPOINT} could not be reached. Check the network (and "
        "HF_ENDPOINT, HTTPS_PROXY), or give the path of a model on disk."
    )
