"""What becomes of images before a model gets them, and attackers' images."""

from __future__ import annotations

import asyncio
import io
import struct
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from PIL import Image as Pillow
from tests.seeing import picture
from tests.waiting import turn, wait_until

from tailrace.errors import QueueFull, RequestError
from tailrace.images.decode_one import MAX_PIXELS
from tailrace.images.image_fetch import ImageFetcher
from tailrace.images.reader import MAX_IMAGES, ImageReader
from tailrace.types import Image


async def _read(content: bytes, *, as_sent: bool = False) -> Image:
    (image,) = await ImageReader().read((Image(content, "where"),), as_sent=as_sent)
    return image


def _pixels(content: bytes) -> tuple[tuple[int, int], bytes]:
    image = Pillow.open(io.BytesIO(content))
    assert (image.format, image.mode, image.info) == ("PNG", "RGB", {})
    return image.size, image.tobytes()


def _saved(image: Pillow.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_each_format_becomes_its_pixels(kind: str) -> None:
    content = picture(1, kind=kind)
    expected = Pillow.open(io.BytesIO(content)).convert("RGB")
    read = await _read(content)
    assert _pixels(read.content) == ((90, 50), expected.tobytes())
    assert (read.media_type, read.param) == ("image/png", "where")
    assert (await _read(content)).content == read.content
    kept = await _read(content, as_sent=True)
    assert (kept.content, kept.media_type) == (content, f"image/{kind.lower()}")


async def test_a_picture_is_turned_and_what_it_says_beside_its_pixels_is_dropped() -> None:
    plain = Pillow.open(io.BytesIO(picture(1)))
    exif = Pillow.Exif()
    exif[0x0112] = 6  # orientation: the camera was turned
    exif[0x010E] = "taken at home"
    for kind in ("PNG", "WEBP"):
        content = _saved(plain, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
        assert b"taken at home" in content
        read = await _read(content)
        assert b"taken at home" not in read.content
        assert _pixels(read.content) == ((50, 90), plain.transpose(Pillow.Transpose.ROTATE_270).tobytes())


async def test_the_first_frame_of_an_animation() -> None:
    frames = [Pillow.new("RGB", (8, 8), color) for color in ("red", "blue")]
    content = _saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert _pixels((await _read(content)).content) == ((8, 8), frames[0].tobytes())


async def test_what_is_transparent_becomes_white() -> None:
    clear = Pillow.new("RGBA", (4, 4), (255, 0, 0, 0))
    white = Pillow.new("RGB", (4, 4), "white").tobytes()
    assert _pixels((await _read(_saved(clear, "PNG"))).content)[1] == white


@pytest.mark.parametrize(("mode", "value", "seen"), [("L", 7, 7), ("I;16", 0x0700, 7), ("1", 1, 255), ("CMYK", 0, 255)])
async def test_other_kinds_of_pixels(mode: str, value: int, seen: int) -> None:
    plain = Pillow.new(mode, (4, 4), (value,) * 4 if mode == "CMYK" else value)
    content = _saved(plain, "JPEG" if mode == "CMYK" else "PNG")
    assert _pixels((await _read(content)).content)[1] == bytes((seen,)) * 48


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _png(width: int, height: int, rows: bytes) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")


def _bomb() -> bytes:
    """0.3 MB that become 300 MB."""
    return _png(10_000, 10_000, bytes(300_010_000))


def _many_frames() -> bytes:
    frame = Pillow.new("L", (4000, 4000))
    return _saved(frame, "GIF", save_all=True, append_images=[frame, frame])


_SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'

_HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a bomb": (_bomb, "pixels"),
    "a header without pixels": (lambda: _png(4000, 4000, b""), "damaged"),
    "a huge header": (lambda: _png(2**31 - 1, 2**31 - 1, b""), "pixels"),
    "one row too many": (lambda: _png(4096, MAX_PIXELS // 4096 + 1, b""), "pixels"),
    "a line": (lambda: _png(10_000, 2, bytes(60_002)), "times as long"),
    "an empty file": (lambda: b"\0", "none of"),
    "SVG": (lambda: _SVG, "none of"),
    "SVG with a byte order mark": (lambda: b"\xef\xbb\xbf" + _SVG, "none of"),
    "HTML": (lambda: b"<html><img src=x onerror=alert(1)>", "none of"),
    "a TIFF": (lambda: _saved(Pillow.new("L", (4, 4)), "TIFF"), "none of"),
    "a BMP": (lambda: _saved(Pillow.new("L", (4, 4)), "BMP"), "none of"),
    "PostScript, which Pillow would give to Ghostscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n", "none of"),
    "a cut PNG": (lambda: picture(1)[:-2000], "damaged"),
    "a cut JPEG": (lambda: picture(1, kind="JPEG")[:-500], "damaged"),
    "a cut WebP": (lambda: picture(1, kind="WEBP")[:-500], "none of|damaged"),
    "a wrong checksum": (lambda: picture(1).replace(b"IDAT", b"IDAX", 1), "none of|damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", _HOSTILE)
async def test_a_hostile_image_is_refused(name: str) -> None:
    make, reason = _HOSTILE[name]
    with pytest.raises(RequestError, match=f"where: this image cannot be used: .*({reason})") as caught:
        await _read(make())
    assert caught.value.param == "where"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
async def test_nothing_of_a_polyglot_but_its_pixels_is_kept(kind: str) -> None:
    """The file is also a script or an archive: that part never leaves the process that decodes it."""
    plain = picture(1, kind=kind)
    payload = b"<script>alert(1)</script>PK\x03\x04"
    read = await _read(plain + payload)
    assert payload not in read.content
    assert read.content == (await _read(plain)).content


async def test_an_animation_with_large_frames_costs_one_frame() -> None:
    assert _pixels((await _read(_many_frames())).content)[0] == (4000, 4000)


async def test_few_are_read_at_once_and_owners_take_turns() -> None:
    images, order = ImageReader(), list[str]()

    async def read(owner: str, number: int) -> None:
        image = Image(picture(number, 300, 300), "where")
        await images.read((image,), as_sent=False, owner=owner, on_read=lambda *_: order.append(owner))

    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(read("greedy", number))
        await turn(1)
        group.create_task(read("modest", 99))
        with pytest.raises(QueueFull) as caught:
            await images.read((Image(picture(98), "where"),), as_sent=False, within_s=0)
        assert caught.value.retry_after_s
    assert order.index("modest") <= 4


async def test_a_slow_host_keeps_only_other_fetches_waiting() -> None:
    started = []

    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            started.append(request)
            await asyncio.Event().wait()
            raise AssertionError

    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34"]

    images = ImageReader(ImageFetcher("*", resolve=resolve, transport=Silent()))
    far, near = Image(b"", "where", url="http://a.example/1"), Image(picture(1), "where")
    async with asyncio.TaskGroup() as group:
        slow = [group.create_task(images.fetch((far,), 60, owner=str(number % 2))) for number in range(8)]
        await wait_until(lambda: len(started) == len(slow))
        with pytest.raises(QueueFull):
            await images.fetch((far,), 0)
        assert await images.fetch((near,), 0) == (near,)
        assert (await images.read((near,), as_sent=True))[0].content == near.content
        for one in slow:
            one.cancel()


async def test_a_request_has_few_images_of_few_bytes() -> None:
    image = Image(picture(1), "where")
    with pytest.raises(RequestError, match=f"at most {MAX_IMAGES} images"):
        await ImageReader().fetch((image,) * (MAX_IMAGES + 1), 0)
    same = await ImageReader().read((image,) * MAX_IMAGES, as_sent=False)
    assert len({one.digest for one in same}) == 1
    other = Image(picture(2), "other")
    with pytest.raises(RequestError, match="MiB") as caught:
        await ImageReader().read((image, other), as_sent=False, most_bytes=2 * len(same[0].content) - 1)
    assert caught.value.param == "other"


async def test_what_was_read_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations have the same images in each turn."""
    images, sent = ImageReader(), Image(picture(1, kind="JPEG"), "where")
    (canonical,) = await images.read((sent,), as_sent=False)
    (as_sent,) = await images.read((sent,), as_sent=True)
    monkeypatch.setattr(subprocess, "run", None)
    assert await images.read((Image(canonical.content, "later"),), as_sent=False) == (
        replace(canonical, param="later"),
    )
    assert await images.read((Image(canonical.content, "later"),), as_sent=True) == (replace(canonical, param="later"),)
    assert await images.read((sent,), as_sent=True) == (as_sent,)
    with pytest.raises(TypeError):
        await images.read((sent,), as_sent=False)
