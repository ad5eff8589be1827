"""Images and videos in every form in which rows and tools give them."""

import asyncio
import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentrl.errors import DataError
from agentrl.media import loading
from agentrl.media.loading import MediaLoader, digest_sources, load_media
from agentrl.media.records import LoadedMedia, MediaKind, Video
from tests.fakes.vision_models import make_processor, random_picture

PICTURE = random_picture(3, (24, 16))


def encode(picture: Image.Image = PICTURE, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


TEXT = base64.b64encode(encode()).decode()
URL = f"data:image/png;base64,{TEXT}"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "a picture.png"
    path.write_bytes(encode())
    return path


def image(source: Any) -> LoadedMedia:
    return load_media(MediaKind.IMAGE, source)


FORMS: list[Callable[[Path], Any]] = [
    lambda file: str(file),
    lambda file: file.as_uri(),
    lambda file: file.read_bytes(),
    lambda file: bytearray(file.read_bytes()),
    lambda file: {"bytes": file.read_bytes(), "path": None},
    lambda file: {"bytes": None, "path": str(file)},
    lambda file: {"image": str(file)},
    lambda file: {"type": "image", "image": PICTURE},
    lambda _: URL,
    lambda _: {"image_url": {"url": URL}},
    lambda _: {"data": TEXT, "mimeType": "image/png"},
    lambda _: PICTURE,
    lambda _: np.asarray(PICTURE),
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_picture(file: Path, form: Callable[[Path], Any]) -> None:
    loaded = image(form(file))
    assert loaded.data.mode == "RGB"
    assert loaded.data.tobytes() == PICTURE.tobytes()
    assert loaded.digest == image(PICTURE).digest


def test_only_files_have_a_source(file: Path) -> None:
    assert image(str(file)).source == str(file)
    assert image(file.read_bytes()).source == image(URL).source == ""


def test_pictures_are_turned_and_made_opaque_and_colored() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # turn by 90 degrees
    assert image(encode(kind="JPEG", exif=turned)).data.size == (16, 24)
    assert image(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).data.getpixel((0, 0)) == (255,) * 3
    assert image(Image.new("L", (1, 1), 7)).data.getpixel((0, 0)) == (7, 7, 7)


def test_a_loaded_picture_is_a_copy() -> None:
    picture = PICTURE.copy()
    loaded = image(picture)
    picture.paste((0, 0, 0), (0, 0, 24, 16))
    assert loaded.data.tobytes() == PICTURE.tobytes()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such.png", "the image cannot be read: No such file"),
        (".", "the image cannot be read: Is a directory"),
        (b"", "an empty image file"),
        (b"no image", "the image cannot be decoded"),
        (encode()[:50], "the image cannot be decoded"),
        ("https://example.com/a.png", "is on a network"),
        ("s3://bucket/a.png", "is on a network"),
        ("data:image/png,abc", "a data URL that begins with"),
        ("data:image/png;base64,?", "not base64"),
        ({"data": "?"}, "not base64"),
        ({}, "a mapping with no key"),
        ({"file": "a.png"}, "a mapping with 'file'"),
        (None, "None is not an image"),
        (7, "7 is not an image"),
        (np.zeros((4, 4)), r"shape \[4, 4\] and type float64"),
        (Image.new("RGB", (0, 5)), "0 x 5 pixels"),
    ],
)
def test_what_is_no_picture_is_named(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        image(source)


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "MAX_PIXELS", 100)
    for source in (encode(), PICTURE):
        with pytest.raises(DataError, match="24 x 16 pixels"):
            image(source)


def test_videos_are_frames() -> None:
    frames = np.stack([np.asarray(random_picture(seed, (8, 6))) for seed in range(3)])
    pictures = [encode(Image.fromarray(frame)) for frame in frames]
    video = Video(frames, 4.0)
    digests = set[str]()
    for source in (frames, pictures, {"video": pictures}, {"video": frames, "fps": 4}, video):
        loaded = load_media(MediaKind.VIDEO, source)
        assert np.array_equal(loaded.data.frames, frames)
        digests.add(loaded.digest)
    assert len(digests) == 2  # with and without frames per second


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "is not a video"),
        (np.zeros((0, 2, 2, 3), np.uint8), "is not a video"),
        (np.zeros((2, 2, 3), np.uint8), "is not a video"),
        ([random_picture(0, (4, 4)), random_picture(0, (4, 8))], "different sizes"),
        ([b"no image"], "cannot be decoded"),
        ({"video": "a.mp4", "fps": 0}, "a video with the fps 0"),
        ({"video": "a.mp4", "max_frames": "many"}, "a video with the max_frames 'many'"),
    ],
)
def test_what_is_no_video_is_named(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_media(MediaKind.VIDEO, source)


async def test_a_group_decodes_its_picture_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def count(kind: MediaKind, source: Any, **given: Any) -> LoadedMedia:
        calls.append(source)
        return load_media(kind, source, **given)

    monkeypatch.setattr(loading, "load_media", count)
    loader = MediaLoader(make_processor("qwen2_vl"))
    row, other = {"bytes": encode()}, {"bytes": encode()}
    items = await asyncio.gather(*(loader.load(MediaKind.IMAGE, row) for _ in range(8)))
    assert calls == [row]
    # Another row with the same picture is decoded, and gets the same item.
    assert all(one is items[0] for one in [*items, await loader.load(MediaKind.IMAGE, other)])


def test_a_picture_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    loader, path = MediaLoader(make_processor("qwen2_vl")), str(tmp_path / "late.png")
    with pytest.raises(DataError):
        asyncio.run(loader.load(MediaKind.IMAGE, path))
    Path(path).write_bytes(encode())
    assert asyncio.run(loader.load(MediaKind.IMAGE, path)).loaded.source == path


def test_a_later_sample_of_a_group_does_not_decode_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda file: opened.append(file) or real(file))
    row = {"bytes": encode(random_picture(9, (12, 12)))}
    first = image(row)
    assert image({"bytes": bytes(row["bytes"])}).data is first.data
    assert len(opened) == 1
    del first
    image(row)
    assert len(opened) == 2  # nobody kept it


def test_sources_are_hashed_without_decoding() -> None:
    forms = [
        {"image": ["a.png"]}, {"image": ["b.png"]}, {"image": [b"x"]}, {"image": [PICTURE]},
        {"image": [np.asarray(PICTURE)]}, {"video": ["a.png"]}, {"image": [{"path": "a.png"}]},
    ]  # fmt: skip
    digests = [digest_sources(media) for media in forms]
    assert digests == [digest_sources(media) for media in forms]
    assert len(set(digests)) == len(forms) - 1  # an array and a picture of the same pixels
    assert digest_sources({}) == digest_sources({"image": []}) == ""
