"""`agentrl doctor`: a healthy run passes; each fault has its row, and hides no other."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agentrl.engines import TransformersEngine
from agentrl.engines.protocol import SyncFigures
from agentrl.errors import ConfigError
from agentrl.trainer.doctor.checkup import Checkup, make_table
from agentrl.trainer.doctor.command import examine
from agentrl.trainer.doctor.machine import find_broken_pins
from agentrl.trainer.doctor.records import Checked, Row, Verdict
from agentrl.training.model import full_tensor, load_causal_lm, load_policy
from tests.fakes_runs import CALL, put, run_agentrl, scripted, tiny_run, write_yaml

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def silent() -> Console:
    return Console(file=io.StringIO(), width=200)


class Looked:
    """The rows of an examination, by name."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = {row.name: row for row in rows}

    def verdict(self, name: str) -> str:
        return str(self._row(name).verdict)

    def text(self, name: str) -> str:
        return "\n".join(self._row(name).lines)

    def faults(self) -> list[str]:
        return [name for name, row in self.rows.items() if row.verdict is Verdict.FAIL]

    def _row(self, name: str) -> Row:
        [found] = [row for full, row in self.rows.items() if full.startswith(name)]
        return found


def look(file: Path, *overrides: str) -> Looked:
    return Looked(examine(file, list(overrides), silent()))


@pytest.fixture
def run(tiny_home: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run(tiny_home, tmp_path / "run", data__cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def run_file(run: dict[str, Any], tmp_path: Path) -> Path:
    return write_yaml(tmp_path / "run.yaml", run)


# A healthy run.


def test_a_healthy_run_passes_and_nothing_is_left_of_it(
    capsys: Capture, run_file: Path, tmp_path: Path
):
    told = run_agentrl(capsys, "doctor", run_file)
    assert (told.code, told.err) == (0, "")
    for word in ("log-probabilities", "weight sync", "answered", "calculator", "nats"):
        assert word in told.out, word
    assert "FAIL" not in told.out
    assert "skipped" not in told.out
    assert list(tmp_path.iterdir()) == [run_file]


def test_rows_say_what_was_found_and_the_policy_is_left_as_it_was(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded: list[tuple[Any, list[torch.Tensor]]] = []

    def loading(*args: Any) -> Any:
        policy = load_policy(*args)
        loaded.append(
            (policy, [full_tensor(w).detach().clone() for _, w in policy.named_weights()])
        )
        return policy

    monkeypatch.setattr("agentrl.trainer.doctor.model.load_policy", loading)
    looked = look(run_file)
    assert looked.faults() == []
    assert "torch" in looked.text("versions")
    assert "14 of train" in looked.text("data")
    assert "4 conversations" in looked.text("rollout")
    assert "by the weights of before" in looked.text("weight sync: every weight changed")
    [(policy, before)] = loaded
    after = [full_tensor(weight) for _, weight in policy.named_weights()]
    assert all(map(torch.equal, before, after))


def test_what_prepare_makes_stays(run: dict[str, Any], tmp_path: Path):
    run["prepare"] = {
        "arithmetic": {
            "out_dir": str(tmp_path / "data"),
            "num_train": 8,
            "num_val": 4,
            "num_demos": 8,
        }
    }
    put(run, "data.train_files", [str(tmp_path / "data/train.parquet")])
    put(run, "data.max_prompt_length", 400)
    file = write_yaml(tmp_path / "run.yaml", run)
    assert look(file).faults() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run.yaml"]


def test_a_script_is_rolled_out_and_has_no_log_probabilities(run: dict[str, Any], tmp_path: Path):
    put(run, "rollout.engine", scripted(CALL, "It is 42."))
    put(run, "data.max_response_length", 200)
    put(run, "rollout.multi_turn.max_tokens_per_turn", None)
    looked = look(write_yaml(tmp_path / "run.yaml", run))
    assert looked.faults() == []
    assert "calculator ok x 4" in looked.text("rollout")
    assert looked.verdict("log-probabilities") == "skipped"
    assert "a script" in looked.text("weight sync: every weight changed")


# Faults.


def test_an_unknown_key_is_the_run_files_and_the_machine_is_looked_at(
    capsys: Capture, run_file: Path
):
    told = run_agentrl(capsys, "doctor", run_file, "rollout.tempratur=1")
    assert told.code == 1
    looked = look(run_file, "rollout.tempratur=1")
    assert looked.faults() == ["run file"]
    assert "temperature" in looked.text("run file")
    assert looked.verdict("machine") == "ok"
    assert looked.text("engine start") == "because of 'disk'"


def test_a_model_that_is_not_there_takes_no_other_check_with_it(run_file: Path, tmp_path: Path):
    looked = look(run_file, f"model.path={tmp_path}/nowhere/at/all")
    assert looked.faults() == ["run file", "tokenizer"]
    assert "no folder" in looked.text("run file")
    assert looked.verdict("tools and users") == "ok"
    assert looked.verdict("rollout") == "skipped"


@pytest.fixture
def forgetful(run: dict[str, Any], tiny_home: Path, tmp_path: Path) -> Path:
    """A run whose template drops older thoughts."""
    source = (tiny_home / "policy/chat_template.jinja").read_text()
    said = "(message.content or '')"
    assert said in source
    dropping = source.replace(said, f"({said} if loop.last else {said}.split('</think>')[-1])")
    (tmp_path / "dropping.jinja").write_text(dropping)
    put(run, "model.custom_chat_template", str(tmp_path / "dropping.jinja"))
    return write_yaml(tmp_path / "run.yaml", run)


def test_law_2_a_template_that_drops_thoughts_is_a_fault(forgetful: Path):
    looked = look(forgetful)
    assert looked.faults() == ["template: law 2, what was sampled stays"]
    assert "on_rewritten_history" in looked.text("template: law 2")
    assert looked.verdict("engine start") == "ok"
    assert looked.verdict("rollout") == "skipped"


def test_law_2_a_template_that_may_rewrite_is_told_of(forgetful: Path):
    looked = look(forgetful, "model.on_rewritten_history=keep")
    assert looked.faults() == []
    assert looked.verdict("template: law 2") == "warn"


BROKEN = """
from agentrl.tools import BaseTool, OpenAIFunctionToolSchema


class Broken(BaseTool):
    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        if config["where"] == "built":
            raise RuntimeError("no key for the service")

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"function": {"name": "broken"}})

    async def create(self, instance_id=None, **kwargs):
        if self.config["where"] == "created":
            raise RuntimeError("the service is down")
        return instance_id

    async def release(self, instance_id, **kwargs):
        if self.config["where"] == "released":
            raise RuntimeError("it does not let go")
"""


@pytest.mark.parametrize(
    ("where", "row", "why"),
    [
        ("built", "tools and users", "no key for the service"),
        ("created", "tools: created", "the service is down"),
        ("released", "tools: created", "it does not let go"),
    ],
)
def test_a_tool_that_raises_is_named(
    run: dict[str, Any], tmp_path: Path, where: str, row: str, why: str
):
    (tmp_path / "broken_tool.py").write_text(BROKEN)
    entry = {"class_name": f"{tmp_path}/broken_tool.py:Broken", "config": {"where": where}}
    put(
        run,
        "rollout.multi_turn.tool_config_path",
        str(write_yaml(tmp_path / "tools.yaml", {"tools": [entry]})),
    )
    looked = look(write_yaml(tmp_path / "run.yaml", run))
    assert looked.verdict(row) == "FAIL"
    assert why in looked.text(row)


# Engines that are not what they seem.


class DeafEngine(TransformersEngine):
    """Takes new weights, and stays with its own."""

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> SyncFigures:
        own = list(self._own.named_parameters())
        for _ in named_tensors:
            pass
        return await super().update_weights(own, version=version)


def give_engine(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the run have a deaf engine on a copy of the policy, changed."""

    def build(config: Any, model: Any, tokenizer: Any, *, dtype: Any = None) -> TransformersEngine:
        own = load_causal_lm(config.model)
        with torch.no_grad():
            change(own)
        engine = DeafEngine.from_model(own, tokenizer=tokenizer)
        engine._own = own
        return engine

    monkeypatch.setattr("agentrl.trainer.doctor.engine.build_engine", build)


def test_an_engine_of_other_weights_is_a_fault_with_its_usual_causes(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
):
    def other(model: Any) -> None:
        for weight in model.parameters():
            weight.neg_()

    give_engine(monkeypatch, other)
    looked = look(run_file)
    assert looked.verdict("log-probabilities") == "FAIL"
    for cause in ("dtype", "attention kernel", "stale weights", "tokenizer"):
        assert cause in looked.text("log-probabilities"), cause
    assert looked.verdict("weight sync: put back") == "FAIL"


def test_an_engine_that_misses_a_sync_is_a_fault(run_file: Path, monkeypatch: pytest.MonkeyPatch):
    give_engine(monkeypatch, lambda model: None)
    looked = look(run_file)
    assert looked.faults() == ["weight sync: every weight changed"]
    assert "still samples by the weights of before" in looked.text("weight sync: every")


def test_an_engine_that_does_not_start_is_a_fault_and_nothing_is_rolled_out(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
):
    def build(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("agentrl.trainer.doctor.engine.build_engine", build)
    looked = look(run_file)
    assert looked.faults() == ["engine start"]
    assert looked.text("rollout") == "because of 'engine start'"


def test_an_interrupted_examination_closes_the_engine(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
):
    closed: list[bool] = []
    close = TransformersEngine.close

    async def closing(self: TransformersEngine) -> None:
        closed.append(True)
        await close(self)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(TransformersEngine, "close", closing)
    monkeypatch.setattr("agentrl.trainer.doctor.command.check_rollout", interrupted)
    with pytest.raises(KeyboardInterrupt):
        look(run_file)
    assert closed


# The table.


def test_a_check_that_raises_ends_no_other():
    with Checkup(silent()) as checkup:
        broken = checkup.look("first", lambda: 1 // 0, advice="divide by less")
        checkup.look("second", lambda: Checked(broken.need(), "never"))
        checkup.look("third", lambda: Checked(3, "three [of them]", doubts=("odd",)))
    first, second, third = checkup.rows
    assert (first.verdict, first.lines[-1]) == (Verdict.FAIL, "divide by less")
    assert (second.verdict, second.lines) == (Verdict.SKIPPED, ("because of 'first'",))
    assert (third.verdict, third.lines) == (Verdict.WARN, ("three [of them]", "note: odd"))


def test_an_error_that_says_what_it_expected_gets_no_other_advice():
    def refuse() -> Any:
        raise ConfigError("too long", key="a.b", expected="a shorter one")

    with Checkup(silent()) as checkup:
        checkup.look("only", refuse, advice="call somebody")
    assert checkup.rows[0].lines == ("too long", "  key: a.b", "  expected: a shorter one")


def test_the_table_shows_texts_as_they_are():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(make_table([Row("a", Verdict.OK, ("[bold]x[/bold]",), 0.25)]))
    assert "[bold]x[/bold]" in console.export_text()


def test_broken_pins_of_an_installed_package_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "pinning-1.0.dist-info"
    folder.mkdir()
    wanted = ["torch<1", "rich>=1", "no-such-thing>=2", "no-extra>=1; extra == 'more'"]
    lines = ["Metadata-Version: 2.1", "Name: pinning", "Version: 1.0"]
    lines += [f"Requires-Dist: {requirement}" for requirement in wanted]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    first, second = find_broken_pins("pinning")
    assert first.startswith("pinning asks for torch<1; installed: ")
    assert second == "pinning asks for no-such-thing>=2; installed: none"
