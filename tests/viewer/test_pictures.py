"""Images of trajectories: those that saved rollouts name are shown, no other file is served."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import numpy as np
import pytest
from PIL import Image

from agentrl.trainer.rollouts.files import read_trajectories
from agentrl.viewer.export import export_runs
from agentrl.viewer.runs import RunReader
from agentrl.viewer.server import ViewServer
from agentrl.viewer.trajectories import describe_trajectory, list_tokens
from tests.fakes.viewer_runs import write_picture_step, write_video_step, write_view_run

LABEL = "rollouts/step_000005"
SECRET = b"the content of another file"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_view_run(tmp_path / "run", num_steps=1, per_step=8)
    write_picture_step(folder, 5)
    return folder


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[ViewServer]:
    server = ViewServer([RunReader(folder)])
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def get_picture(server: ViewServer, name: str, file: str = LABEL) -> tuple[int, bytes]:
    address = f"{server.address}picture?{urlencode({'run': 0, 'file': file, 'name': name})}"
    async with aiohttp.ClientSession() as client, client.get(address) as answer:
        return answer.status, await answer.read()


def pictures_of(folder: Path, number: int = 0) -> list[dict[str, Any]]:
    shown = describe_trajectory(RunReader(folder), f"{LABEL}:{number}")["sequences"][0]
    contents = [one["content"] for one in shown["messages"] if isinstance(one["content"], list)]
    found = [part["picture"] for content in contents for part in content if "picture" in part]
    return [*found, *shown["pictures"]]


def change_pictures(folder: Path, **values: Any) -> None:
    """Change the entries of all pictures of the file."""
    path = folder / f"{LABEL}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for entry in line["request"]["multi_modal_data"]["image"]:
            entry.update(values)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_fake_pictures_are_ones_that_the_library_reads(folder: Path):
    requests = [one.request for one in read_trajectories(folder / f"{LABEL}.jsonl")]
    assert [one.multi_modal_data["image"][0].size for one in requests] == [(640, 480)] * 2


def test_messages_have_their_pictures_with_tokens_and_source(folder: Path):
    of_prompt, of_tool = pictures_of(folder)
    assert (of_prompt["num_tokens"], of_prompt["source"]) == (6, "a/plan.png")
    assert (of_tool["num_tokens"], of_tool["width"], of_tool["height"]) == (4, 24, 24)
    assert [of_prompt["has_files"], of_tool["has_files"]] == [True, True]


def test_the_tokens_of_a_picture_are_a_span_of_their_part(folder: Path):
    tokens = list_tokens(RunReader(folder), f"{LABEL}:0")
    reply = next(turn for turn in tokens["turns"] if turn["role"] == "tool")
    assert tokens["media"] == [{"kind": "image", "start": reply["start"], "end": reply["end"]}]
    prompt = list_tokens(RunReader(folder), f"{LABEL}:0", part="prompt")
    assert prompt["media"] == [{"kind": "image", "start": 0, "end": 6}]


def test_prompts_that_differ_in_their_picture_are_different_rows(folder: Path):
    entries = RunReader(folder).index(LABEL).entries
    assert entries[0].row != entries[1].row
    write_picture_step(folder, 6)
    shown = RunReader(folder)
    for label in shown.find_files():
        shown.index(label)
    assert len(shown.indexed()) == 3
    assert [one["step"] for one in describe_trajectory(shown, f"{LABEL}:0")["same_row"]] == [6]


def test_pictures_without_a_part_in_a_message_are_shown_at_the_end(folder: Path):
    path = folder / f"{LABEL}.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    line["request"]["messages"][2]["content"] = "a part"
    path.write_text(json.dumps(line) + "\n")
    sequence = describe_trajectory(RunReader(folder), f"{LABEL}:0")["sequences"][0]
    assert [one["height"] for one in sequence["pictures"]] == [24]


def test_a_video_is_shown_by_its_first_frame(folder: Path):
    write_video_step(folder, 6)
    run = RunReader(folder)
    (saved,) = read_trajectories(folder / "rollouts" / "step_000006.jsonl")
    video = saved.request.multi_modal_data["video"][0]
    picture = describe_trajectory(run, "rollouts/step_000006:0")["sequences"][0]["messages"][0]
    shown = picture["content"][0]["picture"]
    assert (shown["kind"], shown["frames"], shown["num_tokens"]) == ("video", 3, 5)
    assert shown["has_files"]
    with Image.open(folder / "rollouts" / shown["thumbnail"]) as thumbnail:
        assert np.array_equal(np.asarray(thumbnail), video.frames[0])
    assert not np.array_equal(video.frames[0], video.frames[1])


async def test_pictures_that_lines_name_are_served(server: ViewServer, folder: Path):
    for picture in pictures_of(folder):
        for key in ("path", "thumbnail"):
            status, body = await get_picture(server, picture[key])
            assert status == 200
            assert body == (folder / "rollouts" / picture[key]).read_bytes()


async def test_a_picture_that_no_line_names_is_not_served(server: ViewServer, folder: Path):
    name = f"media/{'0' * 32}.png"
    (folder / "rollouts" / name).write_bytes(SECRET)
    assert (await get_picture(server, name))[0] == 404
    named = pictures_of(folder)[0]["path"]
    assert (await get_picture(server, named, "rollouts/step_000001"))[0] == 404


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "media/../../secret.png", "../../secret.png", "{absolute}", "secret.png",
     "media/secret.png", "media/%2e%2e/secret.png", "file://{absolute}", "media/\x00.png", ""],
)  # fmt: skip
async def test_hostile_names_read_no_other_file(server: ViewServer, folder: Path, name: str):
    for place in (folder.parent, folder, folder / "rollouts", folder / "rollouts" / "media"):
        (place / "secret.png").write_bytes(SECRET)
    name = name.format(absolute=folder / "secret.png")
    change_pictures(folder, path=name, thumbnail=name)
    assert not any(one["has_files"] for one in pictures_of(folder))
    status, body = await get_picture(server, name)
    assert status == 404
    assert SECRET not in body


async def test_a_link_to_another_file_is_not_followed(server: ViewServer, folder: Path):
    (folder / "secret").write_bytes(SECRET)
    name = pictures_of(folder)[0]["thumbnail"]
    (folder / "rollouts" / name).unlink()
    os.symlink(folder / "secret", folder / "rollouts" / name)
    assert (await get_picture(server, name))[0] == 404
    export_runs([RunReader(folder)], folder / "out", steps=[5])
    assert not (folder / "out" / "pictures" / "0" / Path(name).name).exists()


def test_an_export_has_the_thumbnails(folder: Path, tmp_path: Path):
    export_runs([RunReader(folder)], tmp_path / "out", steps=[5])
    wanted = {one["thumbnail"] for number in (0, 1) for one in pictures_of(folder, number)}
    copied = {f"media/{path.name}" for path in (tmp_path / "out/pictures/0").iterdir()}
    assert copied == wanted
    assert len(wanted) == 4


def test_a_missing_file_and_another_entry_are_shown_as_text(folder: Path):
    (folder / "rollouts" / pictures_of(folder)[0]["path"]).unlink()
    assert [one["has_files"] for one in pictures_of(folder)] == [False, True]
    path = folder / f"{LABEL}.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    line["request"]["multi_modal_data"]["image"][0] = "an object"
    path.write_text(json.dumps(line) + "\n")
    assert pictures_of(folder)[0]["text"] == "an object"
