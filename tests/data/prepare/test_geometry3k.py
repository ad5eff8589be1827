from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agentrl.config.load import load_config
from agentrl.config.schema.prepare import Geometry3kConfig
from agentrl.config.schema.run import DataConfig
from agentrl.data.dataset import load_prompts
from agentrl.data.files import Row, write_parquet
from agentrl.data.prepare.geometry3k import prepare_geometry3k
from agentrl.errors import DataError
from agentrl.tools import initialize_tools_from_config
from tests.fakes.vision_runs import encode_png

ROOT = Path(__file__).parents[3]
ANSWERS = ("2 \\sqrt { 221 }", "65", "\\frac { 1 } { 2 }")


def problem(number: int, answer: str) -> Row:
    picture = encode_png(Image.new("RGB", (40 + number, 30), (number, 0, 0)))
    return {
        "images": [{"bytes": picture, "path": None}],
        "problem": f"<image>Find x in figure {number}.",
        "answer": answer,
    }


def source_folder(folder: Path) -> Path:
    """The files that the hub has: a split may have several."""
    folder.mkdir()
    rows = [problem(number, answer) for number, answer in enumerate(ANSWERS)]
    write_parquet(folder / "train-00000-of-00002.parquet", rows[:2])
    write_parquet(folder / "train-00001-of-00002.parquet", rows[2:])
    write_parquet(folder / "test-00000-of-00001.parquet", rows[:1])
    return folder


def test_rows_have_their_picture_and_what_the_tool_needs(tmp_path: Path):
    config = Geometry3kConfig(out_dir=tmp_path / "out", source_dir=source_folder(tmp_path / "in"))
    files = prepare_geometry3k(config)
    prompts = load_prompts([files.train], DataConfig())
    assert [prompt.ground_truth for prompt in prompts] == list(ANSWERS)
    last: Any = prompts[2]
    assert last.data_source == "hiyouga/geometry3k"
    assert last.tools_kwargs == {
        "calc_geo3k_reward": {"create_kwargs": {"ground_truth": ANSWERS[2]}}
    }
    assert [part.type for part in last.messages[1].content] == ["image", "text"]
    assert (last.extra_info["index"], last.extra_info["split"]) == (2, "train")
    assert len(load_prompts([files.test], DataConfig())) == 1
    assert not prepare_geometry3k(config).made


def test_max_samples_limits_each_split(tmp_path: Path):
    source = source_folder(tmp_path / "in")
    config = Geometry3kConfig(out_dir=tmp_path / "out", source_dir=source, max_samples=1)
    files = prepare_geometry3k(config)
    assert [len(load_prompts([file], DataConfig())) for file in files[:2]] == [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"problem": "Find x."}, "0 <image> and 1 images"), ({"answer": None}, "without a problem")],
)
def test_a_row_of_another_form_is_reported(tmp_path: Path, change: Row, message: str):
    source = source_folder(tmp_path / "in")
    rows = [problem(0, "1"), problem(1, "2") | change]
    write_parquet(source / "test-00000-of-00001.parquet", rows)
    with pytest.raises(DataError, match=message) as caught:
        prepare_geometry3k(Geometry3kConfig(out_dir=tmp_path / "out", source_dir=source))
    assert "row: 1" in str(caught.value)


def test_a_folder_without_the_files_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"no file train\*\.parquet"):
        prepare_geometry3k(Geometry3kConfig(out_dir=tmp_path / "out", source_dir=tmp_path))


def test_without_a_connection_the_error_names_the_other_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        prepare_geometry3k(Geometry3kConfig(out_dir=tmp_path))
    assert "prepare.geometry3k.source_dir" in str(caught.value)


async def test_the_example_s_tool_scores_mathematics():
    pytest.importorskip("math_verify")
    config = load_config(ROOT / "examples/geo3k_multiturn/geo3k.yaml")
    path = config.rollout.multi_turn.tool_config_path
    assert path is not None
    [tool] = initialize_tools_from_config(ROOT / path)
    await tool.create("r", ground_truth=ANSWERS[2])
    answers = ("\\boxed{\\frac{1}{3}}", "0.5", "\\boxed{\\frac{1}{2}}", "")
    found: list[Any] = [await tool.execute("r", {"answer": answer}) for answer in answers]
    assert [one.reward for one in found] == [-0.05, 0.0, -0.05, -0.05]
    assert found[0].response.text == "The answer \\frac{1}{3} is scored 0.0."
    assert found[3].response.text == "There is no answer in it."
    assert await tool.calc_reward("r") == 0.0
    await tool.release("r")
