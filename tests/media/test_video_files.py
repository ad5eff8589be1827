"""Video files, written and read by PyAV."""

from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import DataError
from agentrl.media.loading import load_media
from agentrl.media.records import LoadedMedia, MediaKind, Video

av = pytest.importorskip("av")

RATE, NUM_FRAMES, STEP = 10, 40, 6
"""Frames per second, frames, and how much lighter each frame is than the one before it."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video of four seconds that gets lighter."""
    path = tmp_path_factory.mktemp("videos") / "lighter.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv444p"
        for index in range(NUM_FRAMES):
            pixels = np.full((48, 64, 3), index * STEP, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def frames_read(loaded: LoadedMedia) -> list[int]:
    """Indices of the frames of the file, found by their lightness."""
    assert isinstance(loaded.data, Video)
    return (loaded.data.frames.mean((1, 2, 3)) / STEP).round().astype(int).tolist()


def test_two_frames_of_a_second_are_read(file: Path):
    loaded = load_media(MediaKind.VIDEO, str(file))
    assert frames_read(loaded) == [0, 5, 10, 15, 20, 25, 30, 35]
    assert (loaded.data.fps, loaded.source) == (2.0, str(file))


def test_entries_choose_the_rate_and_the_number_of_frames(file: Path):
    entry = {"video": f"file://{file}", "fps": 5}
    assert frames_read(load_media(MediaKind.VIDEO, entry)) == list(range(0, NUM_FRAMES, 2))
    few = load_media(MediaKind.VIDEO, entry | {"max_frames": 4})
    assert len(frames_read(few)) == 4
    assert few.data.fps == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"nonsense" * 100, "cannot be decoded"), (b"", "cannot be decoded"), (None, "no such file")],
)
def test_broken_and_missing_files_are_named(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "broken.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_media(MediaKind.VIDEO, str(path))
    assert caught.value.details["file"] == path
