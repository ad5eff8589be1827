import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.schema.run import DataConfig
from agentrl.data.dataset import PromptDataset, load_prompts
from agentrl.data.files import write_jsonl, write_parquet
from agentrl.data.rows import Prompt, RowReader, without_nulls
from agentrl.errors import DataError, PluginError

QUESTION = [{"role": "user", "content": "2 + 3?"}]
FULL = {
    "data_source": "openai/gsm8k",
    "prompt": QUESTION,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {
        "index": 7,
        "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "5"}}},
        "interaction_kwargs": {"name": "gsm8k", "query": "2 + 3?"},
        "tool_selection": ["calc"],
    },
}


def read(row, **settings) -> Prompt:
    return RowReader("rows.jsonl", DataConfig(**settings)).read(row, 4, 9)


def refusal(row, **settings) -> DataError:
    with pytest.raises(DataError) as caught:
        read(row, **settings)
    return caught.value


def test_a_full_row_becomes_a_prompt():
    prompt = read(FULL)
    assert prompt.index == 9
    assert prompt.messages[0].text == "2 + 3?"
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.ground_truth == "5"
    assert prompt.tools_kwargs == FULL["extra_info"]["tools_kwargs"]
    assert prompt.interaction_kwargs == {"name": "gsm8k", "query": "2 + 3?"}
    assert prompt.tool_selection == ["calc"]
    assert prompt.extra_info == FULL["extra_info"]
    assert prompt.columns == {"ability": "math"}


def test_other_columns_can_be_named():
    prompt = read({"q": QUESTION, "kind": "sums"}, prompt_key="q", reward_fn_key="kind")
    assert (prompt.data_source, prompt.columns) == ("sums", {})


@pytest.mark.parametrize("prompt", ["2 + 3?", json.dumps(QUESTION), QUESTION, np.array(QUESTION)])
def test_a_prompt_may_be_messages_or_their_json_or_a_plain_text(prompt):
    assert [m.to_template() for m in read({"prompt": prompt}).messages] == QUESTION


def test_a_text_that_begins_with_a_bracket_is_a_text():
    assert read({"prompt": "[1, 2] are?"}).messages[0].text == "[1, 2] are?"
    assert read({"prompt": "[1, 2]"}).messages[0].text == "[1, 2]"


def test_nested_columns_may_be_json_texts_and_keep_their_nulls():
    kwargs = {"calc": {"create_kwargs": {"limit": None}}}
    row = {"prompt": "q", "extra_info": {"tools_kwargs": json.dumps(kwargs)}}
    assert read(row).tools_kwargs == kwargs


def test_parts_and_unknown_fields_of_messages_are_kept():
    parts = [{"type": "text", "text": "Why", "mark": 1}, {"type": "text", "text": "?"}]
    message = {"role": "user", "content": parts, "mood": "glad"}
    assert read({"prompt": [message]}).messages[0].to_template() == message


def shown(prompt: Prompt) -> list[str | None]:
    content = prompt.messages[-1].content
    assert isinstance(content, list)
    return [part.text if part.type == "text" else part.type for part in content]


def test_images_are_where_their_marks_are():
    prompt = read({"prompt": "<image>What is <video>?", "images": ["a.png"], "videos": ["b.mp4"]})
    assert shown(prompt) == ["image", "What is ", "video", "?"]
    assert prompt.multi_modal_data == {"image": ["a.png"], "video": ["b.mp4"]}
    assert prompt.columns == {}


def test_images_may_be_parts_of_messages():
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "image"},
    ]
    row = {"prompt": [{"role": "user", "content": parts}], "images": [b"PNG"]}
    prompt = read(row)
    assert shown(prompt) == ["image", "and", "image", "image"]
    url = {"url": "data:image/png;base64,AA"}
    assert prompt.multi_modal_data == {"image": ["a.png", url, b"PNG"]}


def test_images_of_hugging_face_keep_their_bytes():
    image = {"bytes": b"PNG", "path": None}
    prompt = read({"prompt": "<image><image>", "images": [image, image]})
    assert prompt.multi_modal_data["image"] == [image, image]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "What?", "images": ["a.png"]}, "show 0 images of the column 'images', which"),
        ({"prompt": "<image>What?", "images": []}, "show 1 images of the column 'images', which"),
        ({"prompt": "<video>What?", "videos": None}, "show 1 videos of the column 'videos'"),
        ({"prompt": "<image><image>", "images": ["a.png"]}, "show 2 images"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "show 1 images"),
    ],
)
def test_marks_and_images_must_agree(row, message):
    error = refusal(row)
    assert message in str(error)
    assert (error.file, error.row) == ("rows.jsonl", 4)


def test_columns_of_media_may_have_other_names_and_may_be_empty():
    prompt = read({"prompt": "<image>?", "shots": ["a.png"]}, image_key="shots")
    assert prompt.multi_modal_data == {"image": ["a.png"]}
    assert read({"prompt": "?", "images": [], "videos": None}).messages[0].text == "?"
    assert read({"prompt": "<image> is a tag of HTML"}).messages[0].text.startswith("<image>")
    assert read({"prompt": "<video>", "images": []}).messages[0].text == "<video>"


def test_rows_that_need_tools_kwargs_may_be_let_through():
    row = {"prompt": "q", "extra_info": {"need_tools_kwargs": True}}
    assert read(row, strict_rows=False).tools_kwargs == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2 + 3?"}, "a row without 'prompt': it has question"),
        ({"prompt": None}, "a row without 'prompt'"),
        ({"prompt": []}, "'prompt' is []"),
        ({"prompt": 3}, "'prompt' is 3"),
        ({"prompt": ["hello"]}, "prompt.0"),
        ({"prompt": [{"role": "wizard", "content": "x"}]}, "prompt.0.role"),
        ({"prompt": "q", "extra_info": [1]}, "extra_info is [1]"),
        ({"prompt": "q", "extra_info": {"tools_kwargs": "calc"}}, "tools_kwargs is 'calc'"),
        ({"prompt": "q", "reward_model": "5"}, "reward_model is '5'"),
        ({"prompt": "q", "extra_info": {"need_tools_kwargs": True}}, "need_tools_kwargs"),
        ({"prompt": "q", "extra_info": {"tools_kwargs": {"calc": 3}}}, "tools_kwargs.calc"),
    ],
)
def test_a_bad_row_is_reported_with_file_number_and_expectation(row, message):
    error = refusal(row)
    assert (error.file, error.row) == ("rows.jsonl", 4)
    assert error.expected
    assert message in str(error)


def test_what_arrow_filled_in_is_undone(tmp_path: Path):
    rows = [
        {"prompt": QUESTION, "extra_info": {"tools_kwargs": {"a": {"create_kwargs": {"x": "1"}}}}},
        {"prompt": QUESTION, "extra_info": {"tools_kwargs": {"b": {"create_kwargs": {"y": "2"}}}}},
        {"prompt": QUESTION, "extra_info": {"interaction_kwargs": {"name": "gsm8k"}}},
    ]
    write_parquet(tmp_path / "rows.parquet", rows)
    write_jsonl(tmp_path / "rows.jsonl", rows)
    config = DataConfig()
    from_parquet = load_prompts([tmp_path / "rows.parquet"], config)
    assert list(from_parquet) == list(load_prompts([tmp_path / "rows.jsonl"], config))
    assert [prompt.tools_kwargs for prompt in from_parquet] == [
        {"a": {"create_kwargs": {"x": "1"}}},
        {"b": {"create_kwargs": {"y": "2"}}},
        {},
    ]
    assert from_parquet.tools_named() == {"a": 0, "b": 1}


def test_the_sources_of_the_rows_come_with_their_first_row(tmp_path):
    sources = ["sums", "sums", "words", "sums"]
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "q", "data_source": s} for s in sources])
    dataset = load_prompts([tmp_path / "rows.jsonl"], DataConfig())
    assert dataset.sources() == {"sums": 0, "words": 2}
    assert dataset.select([3, 2]).sources() == {"sums": 3, "words": 2}


LEAVES = st.integers() | st.text(max_size=3) | st.just([])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3),
    max_leaves=6,
)


def shape_of(*values):
    """All keys of all the mappings, at every depth, with null in the place of everything else."""
    mappings = [value for value in values if isinstance(value, dict)]
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return {key: shape_of(*(m.get(key) for m in mappings)) for key in keys} if keys else None


def fill(value, shape):
    """Give `value` every key of `shape`, as a column of structs would."""
    if shape is None or not isinstance(value, dict | None):
        return value
    return {key: fill((value or {}).get(key), inner) for key, inner in shape.items()}


ROWS = st.dictionaries(st.text(max_size=3), TREES, min_size=1, max_size=3)


@settings(max_examples=50)
@given(st.lists(ROWS, min_size=1, max_size=3))
def test_filling_the_structs_of_a_column_changes_no_row(rows):
    shape = shape_of(*rows)
    assert [without_nulls(fill(row, shape)) for row in rows] == rows


def test_rows_of_several_files_are_counted_through_and_limited(tmp_path):
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}"} for n in range(3)])
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    everything = load_prompts(files, DataConfig())
    assert [prompt.index for prompt in everything] == list(range(6))
    few = load_prompts(files, DataConfig(), max_samples=4)
    assert [prompt.messages[0].text for prompt in few] == ["a0", "a1", "a2", "b0"]


def test_the_fingerprint_follows_content_and_order():
    def dataset(*texts):
        return PromptDataset(read({"prompt": text}) for text in texts)

    assert dataset("a", "b").fingerprint == dataset("a", "b").fingerprint
    assert len({dataset(*texts).fingerprint for texts in ("ab", "ba", "ac", "a")}) == 4


def test_a_dataset_of_the_user_s_own_gives_rows_or_prompts(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text("""
from agentrl.data.rows import Prompt

class Mine:
    def __init__(self, files, config, *, max_samples):
        self.files, self.config = files, config

    def __len__(self):
        return 3

    def __getitem__(self, place):
        if place == 1:
            return Prompt(index=1, messages=[{"role": "user", "content": "own"}])
        return {"prompt": f"{self.files[0]} {place}"}

class Empty(list):
    def __init__(self, files, config, *, max_samples):
        super().__init__()

class Broken:
    def __init__(self, files, config, *, max_samples):
        raise KeyError("nothing here")

class Odd(list):
    def __init__(self, files, config, *, max_samples):
        super().__init__([3])
""")

    def load(name, **limits):
        custom = {"path": str(source), "name": name}
        return load_prompts(["f"], DataConfig.model_validate({"custom_cls": custom}), **limits)

    assert [p.messages[0].text for p in load("Mine")] == ["f 0", "own", "f 2"]
    assert len(load("Mine", max_samples=2)) == 2
    with pytest.raises(DataError, match="no rows"):
        load("Empty")
    with pytest.raises(DataError, match="nothing here"):
        load("Broken")
    with pytest.raises(DataError, match="a row is int"):
        load("Odd")
    with pytest.raises(PluginError):
        load("Absent")


@pytest.mark.parametrize("name", ["tools_kwargs", "interaction_kwargs", "tool_selection"])
def test_misplaced_extra_info_keys_are_refused(name: str):
    value: Any = ["sql"] if name == "tool_selection" else {"sql": {"create_kwargs": {"x": 1}}}
    row = {"prompt": "Hi", name: value}
    with pytest.raises(DataError, match=f"'{name}' is a column of its own") as caught:
        RowReader("rows.jsonl").read(row, 7, 7)
    assert caught.value.details["row"] == 7
    assert caught.value.details["expected"] == f"extra_info.{name}"
