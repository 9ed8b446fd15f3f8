"""Lists the models on this machine: those of the catalogue, and those in the Hugging Face hub's cache."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tailrace.models.catalogue import CATALOGUE, CatalogueEntry, HubModel, HubSource, is_known, parse_source
from tailrace.models.directories import prepared_path
from tailrace.models.fetch import locate

__all__ = ["StoredModel", "find_stored", "is_here", "stored_models"]

_WEIGHTS = ("*.gguf", "*.safetensors", "openvino_model.bin")
_PREPARED = re.compile(r"(-form\d+)?-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A downloaded model."""

    name: str  # as `tailrace serve` takes it
    num_bytes: int  # including the files that engines have made of it
    changed_s: float  # since the epoch
    paths: tuple[Path, ...]
    revisions: tuple[str, ...] = ()  # in the hub's cache, which other programs also use

    @property
    def is_shared(self) -> bool:
        return bool(self.revisions)

    def remove(self) -> None:
        """Delete the model. A server that has loaded it keeps running. Raises: OSError."""
        if self.revisions:
            from huggingface_hub import constants, scan_cache_dir

            scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*self.revisions).execute()
        for path in self.paths:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def stored_models() -> list[StoredModel]:
    """Return all downloaded models, sorted by name."""
    return sorted([*_of_catalogue(), *_of_hub()], key=lambda model: model.name)


def find_stored(name: str) -> StoredModel | None:
    """Return the model of this name, or None. Accepts the same names as `tailrace pull`."""
    by_name = {model.name: model for model in stored_models()}
    source = parse_source(name) if is_known(name) or name.lower().startswith("hf:") else None
    if isinstance(source, HubModel | HubSource):
        return by_name.get(f"hf:{source.repo}")
    if isinstance(source, CatalogueEntry):
        return by_name.get(source.name)
    return by_name.get(name) or by_name.get(name.lower()) or by_name.get(f"hf:{name}")


def is_here(model: CatalogueEntry | HubModel) -> bool:
    """Return whether a known model needs no download. Of several parts, the first one counts."""
    if isinstance(model, CatalogueEntry):
        return locate(model) is not None
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model.repo, model.file), str)


def _of_catalogue() -> list[StoredModel]:
    found = []
    for entry in CATALOGUE.values():
        if (path := locate(entry)) is not None:
            paths = (path, *_prepared(path.stem))
            found.append(StoredModel(entry.name, sum(map(_size, paths)), path.stat().st_mtime, paths))
    return found


def _of_hub() -> list[StoredModel]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, RuntimeError):  # RuntimeError: the cache is in the user's home, and there is none
        return []
    found = []
    for repository in repositories:
        files = {file.file_name for revision in repository.revisions for file in revision.files}
        if repository.repo_type != "model" or not any(fnmatch(file, kind) for file in files for kind in _WEIGHTS):
            continue
        prepared = tuple(path for file in files if file.endswith(".gguf") for path in _prepared(Path(file).stem))
        found.append(
            StoredModel(
                f"hf:{repository.repo_id}",
                repository.size_on_disk + sum(map(_size, prepared)),
                repository.last_modified,
                prepared,
                tuple(revision.commit_hash for revision in repository.revisions),
            )
        )
    return found


def _prepared(stem: str) -> tuple[Path, ...]:
    """Return the files that engines have made of a model file. Engines make them again if they are missing."""
    directory = Path(prepared_path())
    paths = directory.iterdir() if directory.is_dir() else ()
    return tuple(path for path in paths if _PREPARED.fullmatch(path.name.removeprefix(stem)))


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size
