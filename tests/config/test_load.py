from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import RunConfig, load_config, parse_config, to_yaml
from agentrl.config.problems import known_keys, nearest_key
from agentrl.errors import ConfigError
from agentrl.trainer.setup.preflight import with_absolute_paths

SMALL = {"data": {"train_files": ["train.parquet"]}, "model": {"path": "policy"}}


@pytest.fixture
def run_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(call, *args) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return caught.value


def test_a_small_run_file_is_read_with_defaults(run_file):
    config = load_config(run_file("data: {train_files: [a.parquet]}\nmodel: {path: p}\n"))
    assert config.data.train_files == [Path("a.parquet")]
    assert config.rollout.n == 8


def test_relative_paths_stay_relative_to_the_working_directory(run_file):
    config = load_config(run_file("data: {train_files: a.parquet}\nmodel: {path: p}\n"))
    assert not config.data.train_files[0].is_absolute()


def test_an_address_of_an_object_store_is_not_taken_for_a_folder():
    given = SMALL | {"trainer": {"default_local_dir": "s3://bucket/runs/x"}}
    error = refusal(parse_config, given)
    assert "trainer.default_local_dir: s3:// is not supported" in str(error)
    assert "trainer.default_remote_dir" in str(error)


def test_a_checkpoint_and_the_folder_of_checkpoints_may_be_urls():
    url = "s3://bucket/runs/x"
    trainer = {"default_remote_dir": url + "/", "resume_mode": "path", "resume_from_path": url}
    config = parse_config(SMALL | {"trainer": trainer})
    assert config.trainer.default_remote_dir == config.trainer.resume_from_path == url
    config = parse_config(SMALL | {"trainer": trainer | {"resume_from_path": "runs/a"}})
    assert config.trainer.resume_from_path == Path("runs/a")


def test_progress_may_be_a_bare_off():
    content = yaml.safe_load("trainer: {progress: off}")
    assert parse_config(SMALL | content).trainer.progress == "off"


@pytest.mark.parametrize("url", ["runs/x", "/runs/x", "s3:/bucket", "s3://", "zip://a::s3://b/c"])
def test_what_is_no_url_is_refused(url: str):
    error = refusal(parse_config, SMALL | {"trainer": {"default_remote_dir": url}})
    assert f"trainer.default_remote_dir: is {url!r}; expected a URL" in str(error)


def test_overrides_win_and_are_read_as_yaml(run_file):
    path = run_file("data: {train_files: [a]}\nmodel: {path: p}\ntrainer: {seed: 1}\n")
    overrides = ["trainer.seed=2", "+actor.optim.lr=1e-5", "trainer.logger=[jsonl]", "data.seed=3"]
    config = load_config(path, overrides)
    assert (config.trainer.seed, config.actor.optim.lr) == (2, 1e-5)
    assert (config.trainer.logger, config.data.seed) == (["jsonl"], 3)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("+actor_rollout_ref.actor.optim.lr", "actor.optim.lr"),
        ("custom_reward_function.path", "reward.custom_reward_function"),
        ("actor_rollout_ref.none", "docs/keys.md"),
    ],
)
def test_a_key_of_verl_over_a_run_file_of_agentrl_is_named_with_ours(run_file, key: str, ours: str):
    file = run_file("data: {train_files: [a.parquet]}\nmodel: {path: p}\n")
    error = refusal(load_config, file, [f"{key}=2"])
    assert error.details["key"] == key.lstrip("+")
    assert ours in error.details["expected"]
    assert "file" not in error.details


def test_interpolations_are_resolved(run_file, monkeypatch):
    monkeypatch.setenv("POLICY", "from/env")
    path = run_file("""
data: {train_files: [a], seed: "${trainer.seed}"}
model: {path: "${oc.env:POLICY}"}
trainer: {seed: 7}
""")
    config = load_config(path)
    assert (config.data.seed, config.model.path) == (7, "from/env")


def test_validation_files_are_named_by_their_stems():
    one = parse_config({**SMALL, "data": {"val_files": "x/val.parquet"}})
    two = parse_config({**SMALL, "data": {"val_files": ["x/val.parquet", "x/hard.jsonl"]}})
    assert one.data.val_files == {"val": Path("x/val.parquet")}
    assert list(two.data.val_files) == ["val", "hard"]


def test_validation_files_of_one_stem_need_names():
    raw = {**SMALL, "data": {"val_files": ["a/val.parquet", "b/val.parquet"]}}
    error = refusal(parse_config, raw)
    assert error.key == "data.val_files"
    assert "'val'" in str(error)


def test_a_resolved_configuration_reads_back_as_it_was(run_file):
    config = parse_config({**SMALL, "rollout": {"n": 3, "multi_turn": {"max_tool_calls": 4}}})
    assert load_config(run_file(to_yaml(config))) == config


def test_a_missing_file_is_named(tmp_path):
    error = refusal(load_config, tmp_path / "none.yaml")
    assert error.file == tmp_path / "none.yaml"
    assert "no file" in str(error)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("data:\n  a: 1\n\tb: 2\n", "line 3, column 1"),
        ("data: 1\ndata: 2\n", "line 2, column 1"),
        ("data: [1, 2\nmodel: 3\n", "line 2, column 6"),
    ],
)
def test_malformed_yaml_is_reported_with_line_and_column(run_file, text, place):
    error = refusal(load_config, run_file(text))
    assert place in str(error)


@pytest.mark.parametrize("text", ["- a\n", "\x00", "a: ${\n"])
def test_what_is_no_run_file_is_refused(run_file, text):
    refusal(load_config, run_file(text))


def test_a_folder_is_no_run_file(tmp_path):
    assert "cannot read" in str(refusal(load_config, tmp_path))


@pytest.mark.parametrize("override", ["trainer.seed", "=3", "data.seed=[1", "data.seed=${"])
def test_an_override_that_cannot_be_read_is_refused(run_file, override):
    path = run_file("data: {train_files: [a]}\nmodel: {path: p}\n")
    assert override in str(refusal(load_config, path, [override]))


def test_an_unknown_override_is_reported_as_such(run_file):
    path = run_file("data: {train_files: [a]}\nmodel: {path: p}\n")
    error = refusal(load_config, path, ["trainer.total_trainings_steps=3"])
    assert error.key == "trainer.total_trainings_steps"
    assert "command line" in str(error)
    assert str(error).count(error.key) == 1
    assert "run.yaml" not in str(error)
    assert "trainer.total_training_steps" in str(error)


@pytest.mark.parametrize("override", ["trainer.seed=${nowhere}", "trainer.seed=many", "data.x=1"])
def test_a_problem_of_the_command_line_is_not_laid_on_the_file(run_file, override):
    path = run_file("data: {train_files: [a]}\nmodel: {path: p}\n")
    message = str(refusal(load_config, path, [override]))
    assert message.count("(given on the command line)") == 1
    assert str(path) not in message
    path.write_text("data: {train_files: [a]}\nmodel: {path: p}\nrollout: {m: 2}\n")
    assert f"file: {path}" in str(refusal(load_config, path, ["data.x=1"]))


def test_an_interpolation_that_leads_nowhere_names_its_key(run_file):
    text = 'data: {train_files: [a], seed: "${trainer.sed}"}\nmodel: {path: p}\n'
    assert refusal(load_config, run_file(text)).key == "data.seed"


def test_an_unset_environment_variable_is_reported_with_its_name_and_key(run_file):
    text = 'data: {train_files: [a]}\nmodel: {path: "${oc.env:NO_SUCH_VARIABLE}/p"}\n'
    error = refusal(load_config, run_file(text))
    assert str(error).startswith("the environment variable NO_SUCH_VARIABLE is not set")
    assert (error.key, "full_key" in str(error)) == ("model.path", False)


def test_all_problems_are_reported_at_once_one_per_line():
    raw = {
        "data": {"train_files": ["a"], "train_batch_size": "many", "shuffel": True},
        "model": {},
        "rollout": {"n": 0, "temperature": None},
        "actor": {"loss_agg_mode": "mean", "optim": {"betas": [0.9]}},
    }
    lines = str(refusal(parse_config, raw)).splitlines()
    keys = {line.split(":")[0].removeprefix("- ") for line in lines[1:]}
    assert keys == {
        "data.train_batch_size",
        "data.shuffel",
        "model.path",
        "rollout.n",
        "rollout.temperature",
        "actor.loss_agg_mode",
        "actor.optim.betas[1]",
    }


@pytest.mark.parametrize(
    ("section", "values", "expected"),
    [
        ("data", {"train_batch_size": "many"}, "an integer"),
        ("data", {"train_batch_size": 0}, "a number of at least 1"),
        ("data", {"shuffle": "maybe"}, "true or false"),
        ("data", {"truncation": "up"}, "'middle'"),
        ("rollout", {"temperature": 0}, "a number greater than 0"),
        ("rollout", {"stop": "x"}, "a list"),
        ("rollout", {"multi_turn": 3}, "a section"),
        ("trainer", {"project_name": 3}, "a text"),
    ],
)
def test_a_wrong_value_is_reported_with_the_expected_type(section, values, expected):
    raw = {**SMALL, section: SMALL.get(section, {}) | values}
    error = refusal(parse_config, raw)
    assert error.key == f"{section}.{next(iter(values))}"
    assert expected in str(error.expected)


def test_a_key_of_another_section_leads_to_it():
    assert nearest_key("data.ppo_mini_batch_size") == "actor.ppo_mini_batch_size"
    assert nearest_key("trainr") == "trainer"
    assert nearest_key("zzzzzzzz") is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.generation.temperature", "rollout.temperature"),
        ("rollout.val.temperature", "rollout.temperature"),
        ("generation.max_new_tokens", "rollout.multi_turn.max_tokens_per_turn"),
        ("rollout.stop_tokens", "rollout.stop"),
        ("trainer.cliprange", "actor.clip_ratio"),
        ("agent_loop.name", "rollout.agent.default_agent_loop"),
        ("retriever.url", None),
        ("sandbox.url", "reward.sandbox.url"),
        ("trainer.totl_steps", "trainer.total_training_steps"),
    ],
)
def test_a_hint_is_the_key_of_the_nearest_section_or_none(key: str, meant: str | None):
    assert nearest_key(key) == meant


LISTED = {"functions", "pools", "rules"}
"""Keys whose value is a list of sections."""


def nested(key: str, value: object) -> dict:
    for part in reversed(key.split(".")):
        value = {part: [value] if part in LISTED else value}
    return value  # pyright: ignore[reportReturnType]


def is_section(key: str) -> bool:
    return any(other.startswith(f"{key}.") for other in known_keys())


LEAVES = [key for key in known_keys() if not is_section(key)]
# Which further server arguments there are, the installed SGLang says, where it is started.
CLOSED = [key for key in LEAVES if not key.startswith("rollout.engine.sglang.")]


@given(st.sampled_from(CLOSED), st.data())
def test_unused_keys_an_unknown_key_is_refused_with_the_nearest_known_one(key, data):
    leaf = key.rpartition(".")[2]
    place = data.draw(st.integers(0, len(leaf)))
    letter = data.draw(st.sampled_from("qzx"))
    wrong = f"{key.removesuffix(leaf)}{leaf[:place]}{letter}{leaf[place:]}"
    with pytest.raises(ConfigError) as caught:
        parse_config(nested(wrong, 1))
    shown = wrong
    for part in LISTED:
        shown = shown.replace(f"{part}.", f"{part}[0].")
    matches = [line for line in str(caught.value).splitlines() if f"{shown}: unknown key" in line]
    assert len(matches) == 1
    assert "did you mean" in matches[0]


VALUES = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_nothing_but_a_config_error_comes_of_a_wrong_mapping(raw):
    with pytest.raises(ConfigError):
        parse_config(raw)


def test_known_keys_cover_the_whole_schema():
    assert set(RunConfig.model_fields) <= set(known_keys())
    assert "prepare.sft.optim.lr" in known_keys()


@pytest.mark.parametrize("value", ["[" * 2000, "9" * 5000])
def test_yaml_that_python_cannot_read_is_named(tmp_path: Path, value: str):
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {value}")
    with pytest.raises(ConfigError):
        load_config(file)


@pytest.mark.parametrize(
    ("tokenizer", "expected"), [("", True), (", tokenizer_path: other", False)]
)
def test_a_policy_that_prepare_makes_has_the_tokenizer_made_with_it(run_file, tokenizer, expected):
    prepare = "prepare: {tiny_policy: {out_dir: p, corpus: demos.jsonl}}\n"
    config = load_config(run_file(f"{prepare}data: {{}}\nmodel: {{path: p{tokenizer}}}\n"))
    assert config.prepares_its_policy is expected
    assert with_absolute_paths(config).prepares_its_policy is expected


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_critic_section_of_an_older_run_file_is_accepted(empty: object):
    base = {"data": {"train_files": ["a"]}, "model": {"path": "p"}}
    assert parse_config(base | {"critic": empty}) == parse_config(base)


def test_a_critic_has_a_learning_rate_of_its_own():
    base = {"data": {"train_files": ["a"]}, "model": {"path": "p"}}
    config = parse_config(base | {"critic": {"optim": {"weight_decay": 0.0}}})
    assert config.critic.optim.lr == 1e-5 != config.actor.optim.lr
