"""Pictures of saved rollouts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

from agentrl.media.records import Video
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.rollouts.files import read_rollouts, save_rollouts
from agentrl.trainer.rollouts.pictures import draw_picture
from tests.fakes.finished_requests import make_tool_request


def request_with(**media: list[Any]) -> AsyncRolloutRequest:
    request = make_tool_request(reward=1.0)
    request.multi_modal_data = media
    return request


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    draws = np.random.default_rng(seed)
    return Image.fromarray(draws.integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_an_image_is_read_back_pixel_by_pixel(tmp_path: Path) -> None:
    picture = noise(30, 20)
    save_rollouts(tmp_path / "step_000001.jsonl", [request_with(image=[picture])], step=1)
    (again,) = read_rollouts(tmp_path / "step_000001.jsonl")
    assert again.multi_modal_data["image"][0].tobytes() == picture.tobytes()


def test_the_samples_of_a_group_share_one_file(tmp_path: Path) -> None:
    requests = [request_with(image=[noise(600, 400)]) for _ in range(3)]
    save_rollouts(tmp_path / "step_000001.jsonl", requests, step=1)
    saved = sorted((tmp_path / "media").iterdir())
    assert [path.name.endswith("_small.png") for path in saved] == [False, True]
    with Image.open(saved[1]) as thumbnail:
        assert thumbnail.size == (256, 171)
    lines = (tmp_path / "step_000001.jsonl").read_text().splitlines()
    entries = [json.loads(line)["request"]["multi_modal_data"]["image"][0] for line in lines]
    assert {entry["path"] for entry in entries} == {f"media/{saved[0].name}"}
    assert (entries[0]["width"], entries[0]["height"]) == (600, 400)


def test_a_video_is_read_back_frame_by_frame(tmp_path: Path) -> None:
    frames = np.stack([np.asarray(noise(16, 12, seed)) for seed in range(4)])
    save_rollouts(
        tmp_path / "step_000001.jsonl", [request_with(video=[Video(frames, 2.0)])], step=1
    )
    (again,) = read_rollouts(tmp_path / "step_000001.jsonl")
    video = again.multi_modal_data["video"][0]
    assert video.fps == 2.0
    assert np.array_equal(video.frames, frames)


def test_a_deleted_picture_leaves_its_entry(tmp_path: Path) -> None:
    save_rollouts(tmp_path / "step_000001.jsonl", [request_with(image=[noise(3, 3)])], step=1)
    for path in (tmp_path / "media").iterdir():
        path.unlink()
    (again,) = read_rollouts(tmp_path / "step_000001.jsonl")
    assert again.multi_modal_data["image"][0]["width"] == 3


def test_a_drawn_picture_has_two_pixels_in_each_character() -> None:
    picture = Image.new("RGB", (2, 2), "red")
    picture.putpixel((1, 1), (0, 0, 255))
    console = Console(width=20, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        console.print(draw_picture(picture))
    shown = capture.get()
    assert "38;2;255;0;0;48;2;255;0;0" in shown
    assert "38;2;255;0;0;48;2;0;0;255" in shown
