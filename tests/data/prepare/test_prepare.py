import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.answers import extract_gsm8k_answer
from agentrl.config.schema.prepare import ArithmeticConfig, Gsm8kConfig
from agentrl.config.schema.run import DataConfig
from agentrl.data.dataset import load_prompts
from agentrl.data.files import read_rows, write_jsonl
from agentrl.data.prepare.gsm8k import prepare_gsm8k
from agentrl.data.rows import load_conversations
from agentrl.errors import DataError
from agentrl.quickstart import arithmetic
from agentrl.quickstart.arithmetic import (
    SEEN,
    UNSEEN,
    demonstrate,
    draw_problem,
    prepare_arithmetic,
)

SHARED_GSM8K = Path(__file__).resolve().parents[2].parent / "shared/data/gsm8k"
NOTE = re.compile(r"<<(\d+)([-+*])(\d+)=(\d+)>>")
SETS = ("train", "val", "val_unseen")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("arithmetic")
    return prepare_arithmetic(
        ArithmeticConfig(out_dir=out_dir, num_train=300, num_val=150, num_demos=1200)
    )


def problems_of(file: Path) -> list[dict]:
    return [row["extra_info"] for row in read_rows(file)]


def combination(answer: str) -> str:
    return ",".join("".join(note[:3]) for note in NOTE.findall(answer))


def test_counts_and_columns_are_as_asked(made):
    assert made.made
    assert [len(read_rows(file)) for file in made[:4]] == [300, 150, 150, 1200]
    prompt = load_prompts([made.train], DataConfig())[0]
    assert prompt.data_source == "agentrl/arithmetic"
    assert prompt.extra_info["required_tool"] == "calculator"
    assert [message.role for message in prompt.messages] == ["system", "user"]


def test_steps_are_shared_out_evenly(made):
    for name in SETS:
        steps = Counter(p["num_steps"] for p in problems_of(made._asdict()[name]))
        assert set(steps) == {1, 2, 3}
        assert max(steps.values()) - min(steps.values()) <= 1


def test_no_combination_of_numbers_is_in_two_sets(made):
    sets = [{combination(p["answer"]) for p in problems_of(made._asdict()[s])} for s in SETS]
    sets.append(set(solved_in_demos(made)))
    assert all(sets)
    assert sum(map(len, sets)) == len(set.union(*sets))


def solved_in_demos(made) -> Iterator[str]:
    """The combinations of the problems that demonstrations solve to the end."""
    for talk in load_conversations(made.demos):
        calls = [call.function.arguments for m in talk.messages for call in m.tool_calls or ()]
        if len(re.findall(r"\d+", talk.messages[1].text)) == 1 + len(calls):
            yield ",".join(call["expression"] for call in calls)


def test_other_seeds_make_other_problems_from_the_same_share(made, tmp_path):
    config = ArithmeticConfig(out_dir=tmp_path, seed=1, num_train=300, num_val=30, num_demos=0)
    other = prepare_arithmetic(config)
    ours = {combination(p["answer"]) for p in problems_of(made.val)}
    theirs = {combination(p["answer"]) for p in problems_of(other.train)}
    assert not ours & theirs
    assert read_rows(other.val) != read_rows(made.val)[:30]


def test_unseen_problems_share_no_phrase_with_the_others():
    def phrases(wording):
        steps = [phrase for phrases in wording.steps.values() for phrase in phrases]
        return {*wording.openings, *wording.questions, *steps}

    assert not phrases(SEEN) & phrases(UNSEEN)
    assert SEEN.steps.keys() == UNSEEN.steps.keys()


@settings(max_examples=50)
@given(st.integers(), st.integers(1, 3), st.sampled_from([SEEN, UNSEEN]))
def test_an_answer_adds_up_and_uses_the_question_s_numbers_in_order(seed, num_steps, wording):
    problem = draw_problem(random.Random(seed), wording, num_steps=num_steps)
    notes = NOTE.findall(problem.answer)
    assert len(notes) == num_steps
    value = notes[0][0]
    for left, operator, right, result in notes:
        assert left == value
        assert eval(f"{left}{operator}{right}") == int(result) > 0
        value = result
    assert extract_gsm8k_answer(problem.answer) == value == str(problem.result)
    numbers = tuple(int(number) for number in re.findall(r"\d+", problem.question))
    assert numbers == problem.numbers


def test_the_demonstrator_is_as_rough_as_it_says(made):
    draw, problem = random.Random(0), draw_problem(random.Random(1), SEEN, num_steps=3)
    talks = [demonstrate(problem, draw) for _ in range(4000)]
    calls = Counter(sum("tool_calls" in message for message in talk) for talk in talks)
    assert calls[3] / 4000 == pytest.approx(0.35, abs=0.03)
    assert calls[1] / 4000 == pytest.approx(0.50, abs=0.03)
    assert calls[0] / 4000 == pytest.approx(0.15, abs=0.03)
    answers = {n: {t[-1]["content"] for t in talks if len(t) == 3 + 2 * n} for n in (0, 1, 3)}
    assert answers[3] == {f"#### {problem.result}"}
    assert answers[1] == {f"#### {problem.steps[0].result}"}
    assert answers[0] == {f"#### {number}" for number in problem.numbers}


def test_a_call_s_result_follows_it(made):
    for talk in load_conversations(made.demos)[:100]:
        for call, result in zip(talk.messages[2:-1:2], talk.messages[3:-1:2], strict=True):
            assert call.tool_calls is not None
            assert call.tool_calls[0].function.name == result.name == "calculator"
            assert str(eval(call.tool_calls[0].function.arguments["expression"])) == result.text


def small(out_dir: Path, **changes) -> ArithmeticConfig:
    values = {"out_dir": out_dir, "num_train": 6, "num_val": 3, "num_demos": 4} | changes
    return ArithmeticConfig.model_validate(values)


def contents(out_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out_dir.iterdir()}


def test_the_same_arguments_make_the_same_files_byte_for_byte(tmp_path):
    for name in ("a", "b"):
        prepare_arithmetic(small(tmp_path / name))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == {
        "train.parquet",
        "val.parquet",
        "val_unseen.parquet",
        "demos.jsonl",
        "manifest.json",
    }


def test_what_is_there_is_left_alone_and_what_is_missing_is_made_again(tmp_path):
    assert prepare_arithmetic(small(tmp_path)).made
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert not prepare_arithmetic(small(tmp_path)).made
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / "val.parquet").unlink()
    assert prepare_arithmetic(small(tmp_path)).made


def test_changed_settings_replace_no_finished_file(tmp_path):
    prepare_arithmetic(small(tmp_path))
    before = contents(tmp_path)
    with pytest.raises(DataError, match="finished files are not replaced") as caught:
        prepare_arithmetic(small(tmp_path, seed=5))
    assert caught.value.details["changed"] == "seed: 0 -> 5"
    assert f"delete {tmp_path}" in str(caught.value)
    assert contents(tmp_path) == before


def test_an_unfinished_folder_is_made_again(tmp_path, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arithmetic, "write_jsonl", die)
        with pytest.raises(KeyboardInterrupt):
            prepare_arithmetic(small(tmp_path))
    assert json.loads((tmp_path / "manifest.json").read_text())["complete"] is False
    assert prepare_arithmetic(small(tmp_path)).made
    assert len(read_rows(tmp_path / "demos.jsonl")) == 4


def test_files_of_another_origin_are_not_overwritten(tmp_path):
    mine = tmp_path / "train.parquet"
    mine.write_text("precious")
    with pytest.raises(DataError, match="was not made by"):
        prepare_arithmetic(small(tmp_path))
    assert mine.read_text() == "precious"


def gsm8k_folder(folder: Path, answer: str = "2+3 = <<2+3=5>>5\n#### 1,005") -> Path:
    for split in ("train", "test"):
        write_jsonl(folder / f"{split}.jsonl", [{"question": "2 + 3?", "answer": answer}] * 3)
    return folder


def test_gsm8k_rows_carry_what_tool_and_interaction_need(tmp_path):
    config = Gsm8kConfig(
        out_dir=tmp_path / "out", source_dir=gsm8k_folder(tmp_path / "in"), max_samples=2
    )
    files = prepare_gsm8k(config)
    prompts = load_prompts([files.train], DataConfig())
    assert len(prompts) == 2
    prompt = prompts[1]
    assert (prompt.data_source, prompt.ground_truth) == ("openai/gsm8k", "1005")
    assert prompt.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1005"}}}
    assert prompt.interaction_kwargs == {
        "name": "gsm8k",
        "query": "2 + 3?",
        "ground_truth": "1005",
    }
    assert (prompt.extra_info["index"], prompt.extra_info["split"]) == (1, "train")
    assert not prepare_gsm8k(config).made


def test_a_gsm8k_row_without_an_answer_is_reported_with_its_index(tmp_path):
    config = Gsm8kConfig(
        out_dir=tmp_path / "out", source_dir=gsm8k_folder(tmp_path / "in", answer="five")
    )
    with pytest.raises(DataError, match="#### number") as caught:
        prepare_gsm8k(config)
    assert caught.value.row == 0
    assert str(caught.value.file).endswith("train.jsonl")


def test_gsm8k_without_a_connection_says_what_else_would_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        prepare_gsm8k(Gsm8kConfig(out_dir=tmp_path))
    assert "source_dir" in str(caught.value)


@pytest.mark.skipif(not SHARED_GSM8K.is_dir(), reason="the real GSM8K is not beside the project")
def test_every_row_of_the_real_gsm8k_has_an_answer(tmp_path):
    files = prepare_gsm8k(Gsm8kConfig(out_dir=tmp_path, source_dir=SHARED_GSM8K))
    prompts = load_prompts([files.test], DataConfig())
    assert len(prompts) == 1319
    assert all(re.fullmatch(r"-?\d+", prompt.ground_truth) for prompt in prompts)
