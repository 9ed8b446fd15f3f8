"""Reads images for the engine: the vision tower runs in a thread of its own, beside the steps of the decoder.

A square of an image may take seconds. Meanwhile the sequences that have no image go on, and those of the image wait for
its rows. An image is computed once for all sequences that have it at the same time, and what was computed last is kept.
The same image gives the same rows, bit for bit, on the same machine with the same number of threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Tokens
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from tailrace.engines import Sequence, Sight
from tailrace.errors import SequenceFailed
from tailrace.types import Attachment
from tailrace_plugins.openvino.eye_files import EyeFiles
from tailrace_plugins.openvino.eye_graph import Numbers, build_eye

__all__ = ["Pictures", "VisionTower"]

_KEPT_BYTES = 64 * 2**20  # of rows of images that no sequence has


@dataclass(slots=True, eq=False)
class _Look:
    """An image that is being computed, or is."""

    rows: Future[Numbers]
    num_users: int = 0


@dataclass(slots=True, eq=False)
class Pictures:
    """The images of one sequence."""

    spans: list[tuple[int, int, str]]  # the first token of each, the one behind its last, and its digest
    positions: npt.NDArray[np.int64]  # in the prompt, of the tokens that have rows; ascending
    looks: list[_Look] = field(default_factory=list)
    _rows: Numbers | None = None

    @property
    def is_ready(self) -> bool:
        return all(look.rows.done() for look in self.looks)

    def rows(self) -> Numbers:
        """Return the rows of all images, (tokens, hidden), when they are ready. Raises: what their computation has
        raised."""
        if self._rows is None:
            self._rows = np.concatenate([look.rows.result() for look in self.looks])
        return self._rows

    def between(self, first: int, last: int) -> tuple[npt.NDArray[np.int64], Numbers] | None:
        """Return the positions of rows among some tokens of the prompt, counted from the first of these, and the rows.
        None if there are none."""
        begin, end = np.searchsorted(self.positions, (first, last))
        return None if begin == end else (self.positions[begin:end] - first, self.rows()[begin:end])

    def whole(self, first: int, last: int) -> int:
        """Return the end of a piece of the prompt that cuts no image, near `last`: before an image, or behind it if the
        piece begins with it."""
        for begin, end in self.runs():
            if begin < last < end:
                return begin if begin > first + 1 else end
        return last

    def runs(self) -> list[tuple[int, int]]:
        """Return where tokens with rows follow each other, each with the index behind its last."""
        cuts = np.flatnonzero(np.diff(self.positions) != 1) + 1
        return [(int(part[0]), int(part[-1]) + 1) for part in np.split(self.positions, cuts)]


class VisionTower:
    """Implements `Seeing`, and computes the rows of images."""

    def __init__(self, files: EyeFiles, device: str, options: dict[str, Any]) -> None:
        """Raises: ModelError; the library's RuntimeError."""
        self._shape = files.shape
        self._preparation = files.preparation
        self._spelling = files.spelling
        model = build_eye(files.shape, files.tensors)
        files.tensors.check_all_used(files.shape.num_layers)
        self._request = ov.Core().compile_model(model, device, options).create_infer_request()
        self._thread = ThreadPoolExecutor(1, "eye")
        self._looks: OrderedDict[str, _Look] = OrderedDict()  # by digest, the last used one last

    @property
    def sees_each_other(self) -> bool:
        """Whether the tokens of an image see each other in the decoder."""
        return self._shape.sees_each_other

    def see(self, image: bytes) -> Sight:
        """As `Seeing.see`."""
        grid = self._preparation.grid(image)
        return Sight(self._spelling.placeholder, self._spelling.of(self._shape.num_rows, grid))

    def pictures(self, sequence: Sequence) -> Pictures | None:
        """Begin to read the images of a sequence. None if it has none. Raises: SequenceFailed."""
        images = sequence.images
        if not images:
            return None
        spans, positions, start = [], [], 0
        for segment in sequence.segments:
            ids = segment.token_ids if isinstance(segment, Attachment) else segment
            assert isinstance(ids, tuple)  # `Sequence.prompt_ids` has checked this
            if isinstance(segment, Attachment):
                spans.append((start, start + len(ids), segment.digest))
                positions += [start + index for index in self._positions(ids, sequence.attachments[segment.digest])]
            start += len(ids)
        found = Pictures(spans, np.array(positions, np.int64))
        found.looks = [self._look(digest, sequence.attachments[digest]) for _, _, digest in spans]
        return found

    def forget(self, pictures: Pictures) -> None:
        """End the use of a sequence's images."""
        for look in pictures.looks:
            look.num_users -= 1
        pictures.looks.clear()
        left = _KEPT_BYTES
        for digest, look in reversed(list(self._looks.items())):
            left -= look.rows.result().nbytes if _is_good(look) else 0
            if not look.num_users and (left < 0 or not _is_good(look)):
                look.rows.cancel()
                del self._looks[digest]

    def close(self) -> None:
        for look in self._looks.values():
            look.num_users = 0
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._looks.clear()

    def _positions(self, ids: Tokens[int], image: bytes) -> list[int]:
        """Return which tokens of an image have rows. Raises: SequenceFailed if they are not as many as its rows."""
        positions = [index for index, token_id in enumerate(ids) if token_id == self._spelling.token_id]
        rows, columns = self._preparation.grid(image)
        if len(positions) != (rows * columns + 1) * self._shape.num_rows:
            raise SequenceFailed("the tokens of an image are not those that this model has for it")
        return positions

    def _look(self, digest: str, image: bytes) -> _Look:
        look = self._looks.get(digest)
        is_new = look is None
        if look is None:
            look = self._looks[digest] = _Look(Future())
        self._looks.move_to_end(digest)
        look.num_users += 1
        if is_new:
            self._thread.submit(self._compute, look, image)
        return look

    def _compute(self, look: _Look, image: bytes) -> None:
        if not look.rows.set_running_or_notify_cancel():
            return
        try:
            found = []
            for pixels in self._preparation.squares(image):
                if not look.num_users:  # `forget` has removed it
                    look.rows.set_exception(SequenceFailed("nobody waits for this image"))
                    return
                found.append(self._request.infer({"pixels": pixels})["rows"].copy())
            look.rows.set_result(np.concatenate(found))
        except BaseException as error:
            look.rows.set_exception(error)


def _is_good(look: _Look) -> bool:
    return look.rows.done() and not look.rows.cancelled() and look.rows.exception() is None
