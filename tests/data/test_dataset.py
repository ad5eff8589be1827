"""Dataset classes of users: each gets the arguments that its constructor takes."""

from pathlib import Path

import pytest

from agentrl.config.schema.run import CustomClassConfig, DataConfig
from agentrl.data.dataset import load_prompts
from agentrl.errors import DataError

SOURCE = """
class Mine:
    def __init__(self, {parameters}):
        given = {{name: value for name, value in locals().items() if name != "self"}}
        given |= given.pop("kwargs", {{}})
        given |= dict(zip(("files", "config"), given.pop("args", ())))
        files = given.get("files", given.get("data_files"))
        assert [str(file) for file in files] == ["a.jsonl"], files
        assert given["config"].max_prompt_length == 64
        assert given.get("max_samples", {max_samples}) == {max_samples}
        assert given.get("tokenizer") is None and given.get("processor") is None

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {{"prompt": [{{"role": "user", "content": str(index)}}]}}
"""


def num_rows(folder: Path, parameters: str, max_samples: int | None) -> int:
    is_verls = "tokenizer" in parameters
    shown = -1 if is_verls and max_samples is None else max_samples
    source = SOURCE.format(parameters=parameters, max_samples=shown)
    (path := folder / "mine.py").write_text(source)
    custom = CustomClassConfig(path=str(path), name="Mine")
    config = DataConfig(custom_cls=custom, max_prompt_length=64)
    return len(load_prompts(["a.jsonl"], config, max_samples=max_samples))


@pytest.mark.parametrize("max_samples", [None, 2])
@pytest.mark.parametrize(
    "parameters",
    [
        "files, config",
        "data_files, config",
        "files, config, max_samples",
        "files, config, *, max_samples=None",
        "files, config, **kwargs",
        "*args, **kwargs",
        "data_files, tokenizer, config",
        "data_files, tokenizer, config, processor",
        "data_files, tokenizer, config, processor=None, max_samples=-1",
        "config, tokenizer, data_files, max_samples",
        "*, data_files, config, tokenizer",
        "data_files, tokenizer, config, **kwargs",
    ],
)
def test_a_dataset_class_gets_what_it_takes(
    tmp_path: Path, parameters: str, max_samples: int | None
):
    assert num_rows(tmp_path, parameters, max_samples) == (max_samples or 5)


@pytest.mark.parametrize("parameters", ["files", "files, config, more", "data_files, tokenizer, x"])
def test_a_dataset_class_that_needs_something_else_is_refused(tmp_path: Path, parameters: str):
    with pytest.raises(DataError, match=r"the dataset class .*mine\.py:Mine raised") as error:
        num_rows(tmp_path, parameters, None)
    assert "(data_files, tokenizer, config, processor)" in str(error.value)
