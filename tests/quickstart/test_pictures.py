import io
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agentrl import Trainer
from agentrl.config.load import load_config
from agentrl.config.schema.prepare import PicturesConfig
from agentrl.data.files import Row, read_rows
from agentrl.quickstart.pictures import (
    COLORS,
    MARK,
    PLACES,
    PictureFiles,
    demonstrate,
    draw_colors,
    draw_picture,
    prepare_pictures,
    region,
    score_color,
)
from agentrl.quickstart.tiny_policy import make_image_processor

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/pictures/quickstart.yaml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> PictureFiles:
    out_dir = tmp_path_factory.mktemp("pictures")
    config = PicturesConfig(out_dir=out_dir, num_train=40, num_val=30, num_demos=20)
    return prepare_pictures(config)


def shown(row: Row, number: int = 0) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][number]["bytes"]))


def color_in_the_middle(crop: Image.Image) -> str:
    bands = np.asarray(crop)[MARK // 2, MARK // 2]
    [color] = [color for color, signs in COLORS.items() if (np.sign(bands - 128.0) == signs).all()]
    return color


def test_the_ground_truth_is_the_color_in_the_region(made: PictureFiles):
    for row in read_rows(made.train):
        crop = shown(row).crop(row["extra_info"]["region"])
        assert color_in_the_middle(crop) == row["reward_model"]["ground_truth"]
        assert any(place in row["prompt"][0]["content"] for place in PLACES)


def test_no_picture_is_in_two_sets(made: PictureFiles):
    train, val = ({row["images"][0]["bytes"] for row in read_rows(file)} for file in made[:2])
    assert (len(train), len(val)) == (40, 30)
    assert not train & val


def test_the_same_seed_makes_the_same_pictures(made: PictureFiles, tmp_path: Path):
    sizes = {"num_train": 40, "num_val": 30, "num_demos": 20}
    again = prepare_pictures(PicturesConfig(out_dir=tmp_path / "a", **sizes))
    other = prepare_pictures(PicturesConfig(out_dir=tmp_path / "b", seed=1, **sizes))
    for file, same, different in zip(made[:3], again[:3], other[:3], strict=True):
        assert read_rows(file) == read_rows(same) != read_rows(different)
    assert not prepare_pictures(PicturesConfig(out_dir=tmp_path / "a", **sizes)).made


def test_no_dot_is_visible_in_the_shrunken_picture_but_in_its_region():
    config = load_config(EXAMPLE).prepare.tiny_policy
    assert config is not None
    assert config.vision is not None
    processor = make_image_processor(config.vision)

    def pixels(picture: Image.Image) -> np.ndarray:
        return processor(images=[picture], return_tensors="np")["pixel_values"]

    draw = random.Random(0)
    pictures = [draw_picture(draw_colors(draw)) for _ in range(20)]
    assert len({picture.tobytes() for picture in pictures}) == 20
    assert len({pixels(picture).tobytes() for picture in pictures}) == 1
    crops = [draw_picture((color,) * len(PLACES)).crop(region(4)) for color in COLORS]
    assert len({pixels(crop).tobytes() for crop in crops}) == len(COLORS)


def test_a_demonstration_names_the_color_that_it_sees_or_guesses():
    draw = random.Random(0)
    ways: Counter[str] = Counter()
    for _ in range(400):
        row = demonstrate(draw)
        answer = row["messages"][-1]["content"]
        if answer.startswith("I guess"):
            ways["guess"] += 1
        else:
            ways["zoom" if len(row["images"]) == 2 else "name"] += 1
            assert color_in_the_middle(shown(row, -1)) == answer
    assert ways["guess"] > ways["zoom"] > ways["name"]


@pytest.mark.parametrize(
    ("answer", "score"), [("red", 1.0), ("I guess red.", 1.0), ("blue", 0.0), ("", 0.0)]
)
def test_the_last_word_is_scored(answer: str, score: float):
    assert score_color("agentrl/pictures", answer, "red") == {"score": score, "success": score}


@pytest.mark.slow
def test_a_small_run_of_the_example_makes_everything_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    sizes = ("pictures.num_train=16", "pictures.num_val=8", "pictures.num_demos=64", "sft.steps=2")
    changes = [f"prepare.{size}" for size in sizes]
    changes += ["data.train_batch_size=4", "rollout.n=2", "actor.ppo_mini_batch_size=4"]
    changes += ["trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path}"]
    Trainer(load_config(EXAMPLE, changes)).fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("val/pictures/success" in line for line in lines)
    assert any("actor/grad_norm" in line for line in lines)
