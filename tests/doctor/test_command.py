"""`agentrl doctor`: a healthy run passes; each fault has its row, and hides no other."""

import io
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agentrl.config import parse_config
from agentrl.config.schema.reward import RewardConfig
from agentrl.doctor import log_probs
from agentrl.doctor.command import examine
from agentrl.doctor.inputs import check_sandboxes
from agentrl.doctor.machine import find_broken_pins
from agentrl.doctor.report import Checked, CheckRunner, Result, Row, Verdict, make_table
from agentrl.engines import ScriptedEngine, TransformersEngine
from agentrl.engines.protocol import SyncFigures
from agentrl.errors import ConfigError, EngineError
from agentrl.rewards import make_reward_manager
from agentrl.trainer.engine_sync import EngineSync
from agentrl.trainer.setup.plugins import Plugins
from agentrl.workers.load import load_causal_lm, load_policy
from agentrl.workers.model import PolicyModel
from agentrl.workers.shards import full_tensor
from tests.fakes.runs import CALCULATOR, CALL, put, run_agentrl, scripted, tiny_run, write_yaml

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


@dataclass(frozen=True)
class Healthy:
    """An examination that finds nothing."""

    looked: Looked
    folder: Path
    file: Path
    policy: PolicyModel
    before: list[torch.Tensor]
    """The policy's weights when it was loaded."""


@pytest.fixture(scope="module")
def healthy(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    folder = tmp_path_factory.mktemp("healthy")
    changes = {"data__cache_dir": str(folder / "cache")}
    file = write_yaml(folder / "run.yaml", tiny_run(tiny_home, folder / "run", **changes))
    loaded: list[tuple[PolicyModel, list[torch.Tensor]]] = []

    def loading(*args: Any, **settings: Any) -> Any:
        policy = load_policy(*args, **settings)
        loaded.append((policy, [w.detach().clone() for w in weights_of(policy)]))
        return policy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.doctor.model.load_policy", loading)
        looked = look(file)
    [(policy, before)] = loaded
    return Healthy(looked, folder, file, policy, before)


def weights_of(policy: PolicyModel) -> list[torch.Tensor]:
    return [full_tensor(weight) for _, weight in policy.named_weights()]


def test_a_healthy_run_passes_and_leaves_no_files(healthy: Healthy):
    assert {row.verdict for row in healthy.looked.rows.values()} <= {Verdict.OK, Verdict.WARN}
    assert list(healthy.folder.iterdir()) == [healthy.file]


def test_rows_say_what_was_found(healthy: Healthy):
    looked = healthy.looked
    assert "torch" in looked.text("versions")
    assert "14 of train" in looked.text("data")
    assert "4 conversations" in looked.text("rollout")
    assert "calculator" in looked.text("tools and interactions")
    assert "nothing in the run uses one" in looked.text("sandbox")
    assert "nats" in looked.text("log-probabilities")
    assert looked.text("engine sleep and wake") == "engine and trainer share no accelerator"
    assert "with the old weights" in looked.text("weight sync: every weight changed")


def test_the_policy_is_left_as_it_was(healthy: Healthy):
    assert all(map(torch.equal, healthy.before, weights_of(healthy.policy)))


@pytest.fixture
def script(run: dict[str, Any]) -> dict[str, Any]:
    """A run whose engine takes no time."""
    put(run, "rollout.engine", scripted(CALL, "It is 42."))
    put(run, "data.max_response_length", 200)
    put(run, "rollout.multi_turn.max_tokens_per_turn", None)
    return run


def test_the_command_shows_the_table_and_exits_with_0(
    capsys: Capture, script: dict[str, Any], tmp_path: Path
):
    output = run_agentrl(capsys, "doctor", write_yaml(tmp_path / "run.yaml", script))
    assert (output.code, output.err) == (0, "")
    assert "weight sync" in output.out
    assert "FAIL" not in output.out


def test_what_prepare_makes_stays(script: dict[str, Any], tmp_path: Path):
    script["prepare"] = {
        "arithmetic": {
            "out_dir": str(tmp_path / "data"),
            "num_train": 8,
            "num_val": 4,
            "num_demos": 8,
        }
    }
    put(script, "data.train_files", [str(tmp_path / "data/train.parquet")])
    put(script, "data.max_prompt_length", 400)
    file = write_yaml(tmp_path / "run.yaml", script)
    assert look(file).faults() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run.yaml"]


def test_a_script_is_rolled_out_and_has_no_log_probabilities(
    script: dict[str, Any], tmp_path: Path
):
    looked = look(write_yaml(tmp_path / "run.yaml", script))
    assert looked.faults() == []
    assert "calculator ok x 4" in looked.text("rollout")
    assert looked.verdict("log-probabilities") == "skipped"
    assert "scripted engine" in looked.text("weight sync: every weight changed")


# Faults.


def test_an_unknown_key_is_the_run_files_and_the_machine_is_looked_at(
    capsys: Capture, run_file: Path
):
    output = run_agentrl(capsys, "doctor", run_file, "rollout.tempratur=1")
    assert output.code == 1
    looked = look(run_file, "rollout.tempratur=1")
    assert looked.faults() == ["run file"]
    assert "temperature" in looked.text("run file")
    assert looked.verdict("machine") == "ok"
    assert looked.text("engine start") == "because of 'run file'"


def test_a_model_that_is_not_there_takes_no_other_check_with_it(run_file: Path, tmp_path: Path):
    looked = look(run_file, f"model.path={tmp_path}/nowhere/at/all")
    assert looked.faults() == ["run file", "tokenizer"]
    assert "no folder" in looked.text("run file")
    assert looked.verdict("tools and interactions") == "ok"
    assert looked.verdict("rollout") == "skipped"


def test_critic_with_heads_that_the_ranks_cannot_divide_is_a_fault(run_file: Path):
    key = "critic.ulysses_sequence_parallel_size"
    looked = look(run_file, "algorithm.adv_estimator=gae", f"{key}=3")
    assert looked.faults() == ["policy"]
    lines = "\n".join(looked.rows["policy"].lines)
    assert key in lines
    assert "3 ranks cannot divide the heads" in lines


@pytest.fixture
def forgetful(script: dict[str, Any], tiny_home: Path, tmp_path: Path) -> Path:
    """A run whose template drops older thoughts."""
    source = (tiny_home / "policy/chat_template.jinja").read_text()
    said = "(message.content or '')"
    assert said in source
    dropping = source.replace(said, f"({said} if loop.last else {said}.split('</think>')[-1])")
    (tmp_path / "dropping.jinja").write_text(dropping)
    put(script, "model.custom_chat_template", str(tmp_path / "dropping.jinja"))
    return write_yaml(tmp_path / "run.yaml", script)


def test_sampled_tokens_a_template_that_drops_thoughts_is_a_fault(forgetful: Path):
    looked = look(forgetful)
    assert looked.faults() == ["template: sampled tokens are kept"]
    assert "on_rewritten_history" in looked.text("template: sampled tokens are kept")
    assert looked.verdict("engine start") == "ok"
    assert looked.verdict("rollout") == "skipped"


def test_sampled_tokens_a_template_that_may_rewrite_is_reported(forgetful: Path):
    looked = look(forgetful, "model.on_rewritten_history=keep")
    assert looked.faults() == []
    assert looked.verdict("template: sampled tokens are kept") == "warn"


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

    async def execute(self, instance_id, parameters, **kwargs):
        raise RuntimeError("no answer")

    async def release(self, instance_id, **kwargs):
        if self.config["where"] == "released":
            raise RuntimeError("it does not let go")
"""


@pytest.mark.parametrize(
    ("where", "row", "why"),
    [
        ("built", "tools and interactions", "no key for the service"),
        ("created", "tools: created", "the service is down"),
        ("released", "tools: created", "it does not let go"),
        ("executed", "rollout", "tool 'broken' failed in 4 of 4 calls: RuntimeError: no answer"),
    ],
)
def test_a_tool_that_raises_is_named(
    script: dict[str, Any], tmp_path: Path, where: str, row: str, why: str
):
    (tmp_path / "broken_tool.py").write_text(BROKEN)
    entry = {"class_name": f"{tmp_path}/broken_tool.py:Broken", "config": {"where": where}}
    put(
        script,
        "rollout.multi_turn.tool_config_path",
        str(write_yaml(tmp_path / "tools.yaml", {"tools": [entry]})),
    )
    answer = CALL.replace("calculator", "broken")
    put(script, "rollout.engine", scripted(answer, "#### 42"))
    looked = look(write_yaml(tmp_path / "run.yaml", script))
    assert looked.verdict(row) == "FAIL"
    assert why in looked.text(row)


@pytest.fixture
def coding(script: dict[str, Any], tmp_path: Path) -> Path:
    """A run whose policy may run Python."""
    entry = {"class_name": "agentrl.tools.python_tool.PythonTool"}
    tools = write_yaml(tmp_path / "tools.yaml", {"tools": [entry]})
    put(script, "rollout.multi_turn.tool_config_path", str(tools))
    return write_yaml(tmp_path / "run.yaml", script)


@pytest.fixture
def no_sandbox_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sandbox provider works on this machine."""
    for module in ("agentrl.sandbox.factory", "agentrl.doctor.inputs"):
        monkeypatch.setattr(f"{module}.unavailable_reason", lambda *_, **__: "it is not installed")


def test_the_sandbox_has_a_row(coding: Path):
    looked = look(coding)
    assert looked.verdict("sandbox") == "ok"
    assert "used by python (auto)" in looked.text("sandbox")
    assert ": works" in looked.text("sandbox")


@pytest.mark.usefixtures("no_sandbox_provider")
def test_a_tool_that_finds_no_sandbox_says_what_to_install(
    capsys: Capture, coding: Path, tmp_path: Path
):
    looked = look(coding)
    assert "tools and interactions" in looked.faults()
    assert "pip install 'sandlock<" in looked.text("tools and interactions")
    assert "tools[0].config.sandbox" in looked.text("tools and interactions")
    assert looked.text("sandbox") == "because of 'tools and interactions'"
    output = run_agentrl(capsys, "config", "check", coding)
    assert output.code != 0
    assert "no sandbox provider on this machine" in output.err


@pytest.mark.usefixtures("no_sandbox_provider")
def test_a_scorer_that_finds_no_sandbox_is_reported_before_the_run(
    capsys: Capture, script: dict[str, Any], tmp_path: Path
):
    put(script, "reward.functions", [{"name": "code"}])
    file = write_yaml(tmp_path / "run.yaml", script)
    looked = look(file)
    assert "reward.sandbox" in looked.text("tools and interactions")
    output = run_agentrl(capsys, "config", "check", file)
    assert "reward.sandbox" in output.err


@pytest.mark.usefixtures("no_sandbox_provider")
def test_why_no_sandbox_works_is_listed_once(script: dict[str, Any]):
    put(script, "reward.functions", [{"name": "code"}])
    rewards = make_reward_manager(RewardConfig())
    found = check_sandboxes(parse_config(script), Plugins([], {}, rewards), Result("data", None))
    [fault] = found.faults
    assert found.found.count("it is not installed") == 2
    assert "it is not installed" not in fault
    assert "the system's package bubblewrap" in fault


@pytest.fixture
def made(script: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A run that makes its data, and for its tools its policy and the warm-up of that."""
    data, policy = tmp_path / "data", tmp_path / "policy"
    sizes = {"vocab_size": 400, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1}
    corpus = {"out_dir": str(policy), "corpus": str(data / "demos.jsonl")}
    script["prepare"] = {
        "arithmetic": {"out_dir": str(data), "num_train": 8, "num_val": 4, "num_demos": 20},
        "tiny_policy": corpus | sizes,
    }
    script["prepare"]["sft"] = {
        "model_path": str(policy),
        "train_file": str(data / "demos.jsonl"),
        "out_dir": str(tmp_path / "warm"),
        "steps": 1,
        "batch_size": 2,
        "tool_config_path": str(tmp_path / "tools.yaml"),
    }
    shutil.copy(CALCULATOR, tmp_path / "tools.yaml")
    put(script, "rollout.multi_turn.tool_config_path", str(tmp_path / "tools.yaml"))
    put(script, "model.path", str(tmp_path / "warm"))
    put(script, "data.train_files", [str(data / "train.parquet")])
    put(script, "data.max_prompt_length", 400)
    return script


def break_tools(run: dict[str, Any], folder: Path) -> Path:
    entry = {"class_name": "agentrl.tools.calculator_tool.CalculatorTol"}
    tools = write_yaml(folder / "tools.yaml", {"tools": [entry]})
    assert str(tools) == run["rollout"]["multi_turn"]["tool_config_path"]
    return write_yaml(folder / "run.yaml", run)


def test_broken_tools_take_no_row_with_them_that_needs_none(made: dict[str, Any], tmp_path: Path):
    assert look(write_yaml(tmp_path / "run.yaml", made)).faults() == []
    there = {path: path.read_bytes() for path in tmp_path.glob("*/*") if path.is_file()}
    looked = look(break_tools(made, tmp_path))
    assert looked.faults() == ["tools and interactions"]
    assert "did you mean 'CalculatorTool'?" in looked.text("tools and interactions")
    for row in ("prepare", "tokenizer", "policy", "engine start", "engine end"):
        assert Verdict.SKIPPED not in [r.verdict for n, r in looked.rows.items() if n == row], row
    skipped = [row for row in looked.rows.values() if row.verdict is Verdict.SKIPPED]
    assert {row.lines for row in skipped} == {("because of 'tools and interactions'",)}
    assert "rollout" in [row.name for row in skipped]
    assert {path.parent.name for path in there} == {"data", "policy", "warm"}
    assert {path: path.read_bytes() for path in there} == there


def test_a_policy_that_is_yet_to_be_made_waits_for_its_tools(made: dict[str, Any], tmp_path: Path):
    looked = look(break_tools(made, tmp_path))
    assert looked.faults() == ["tools and interactions"]
    for row in ("prepare", "tokenizer", "engine start"):
        assert looked.text(row) == "because of 'tools and interactions'"


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

    def build(config: Any, model: Any, tokenizer: Any, **kwargs: Any) -> TransformersEngine:
        own = load_causal_lm(config.model)
        with torch.no_grad():
            change(own)
        engine = DeafEngine.from_model(own, tokenizer=tokenizer)
        engine._own = own
        return engine

    monkeypatch.setattr("agentrl.doctor.engine.build_engine", build)


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
    assert looked.verdict("weight sync: weights restored") == "FAIL"


def test_an_engine_that_misses_a_sync_is_a_fault(run_file: Path, monkeypatch: pytest.MonkeyPatch):
    give_engine(monkeypatch, lambda model: None)
    looked = look(run_file)
    assert looked.faults() == ["weight sync: every weight changed"]
    assert "still samples with the old weights" in looked.text("weight sync: every")


# Memory that goes to and fro.


@pytest.fixture
def engine_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine is told that has one accelerator with the trainer, and when is scored."""
    engine_calls: list[str] = []

    def noting(name: str, tell: Callable[..., str], owner: Any = TransformersEngine) -> None:
        done = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            engine_calls.append(tell(*args[1:], **kwargs))
            return done(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    noting("sleep", lambda: "sleep")
    noting("wake", lambda tags: " ".join(("wake", *tags)))
    noting("update_weights", lambda weights, version: f"weights {version}")
    noting("generate_together", lambda calls: "generate")
    noting("score_rows", lambda *args, **kwargs: "score", log_probs)
    share_accelerator(monkeypatch, given=10**9)
    return engine_calls


def share_accelerator(monkeypatch: pytest.MonkeyPatch, *, given: int) -> None:
    free = iter([0, given])

    def of(config: Any, engine: Any, policy: Any) -> EngineSync:
        return EngineSync(engine=engine, policy=policy, max_attempts=3, gives_memory=True)

    monkeypatch.setattr(EngineSync, "of", of)
    monkeypatch.setattr("agentrl.doctor.engine_sync._free_bytes", lambda device: next(free))


def test_the_engine_sleeps_while_its_answers_are_scored(run_file: Path, engine_calls: list[str]):
    looked = look(run_file)
    assert looked.faults() == []
    assert looked.text("engine sleep and wake").startswith("freed 1.0 GB")

    def renewed(version: int) -> list[str]:
        return ["wake weights", f"weights {version}", "wake kv_cache", "generate", "sleep"]

    first = engine_calls.index("sleep")
    assert engine_calls[first:] == [
        "sleep", *renewed(0), "score", *renewed(1), "score", "score", *renewed(2), "score",
    ]  # fmt: skip


def test_an_engine_that_keeps_its_memory_is_reported(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    share_accelerator(monkeypatch, given=0)
    looked = look(write_yaml(tmp_path / "run.yaml", script))
    assert looked.verdict("engine sleep and wake") == "warn"


def test_an_engine_that_cannot_wake_is_a_fault_and_gets_no_new_weights(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def failing(engine: Any, tags: Any) -> None:
        raise EngineError("out of memory")

    share_accelerator(monkeypatch, given=10**9)
    monkeypatch.setattr(ScriptedEngine, "wake", failing)
    looked = look(write_yaml(tmp_path / "run.yaml", script))
    assert looked.faults() == ["engine sleep and wake"]
    assert "out of memory" in looked.text("engine sleep and wake")
    assert looked.text("weight sync: weights restored") == "because of 'engine sleep and wake'"


def test_an_engine_that_does_not_start_is_a_fault_and_nothing_is_rolled_out(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
):
    def build(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("agentrl.doctor.engine.build_engine", build)
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
    monkeypatch.setattr("agentrl.doctor.command.check_rollout", interrupted)
    with pytest.raises(KeyboardInterrupt):
        look(run_file)
    assert closed


# The table.


def test_a_check_that_raises_ends_no_other():
    with CheckRunner(silent()) as checkup:
        broken = checkup.run("first", lambda: 1 // 0, advice="divide by less")
        checkup.run("second", lambda: Checked(broken.need(), "never"))
        checkup.run("third", lambda: Checked(3, "three [of them]", doubts=("odd",)))
    first, second, third = checkup.rows
    assert (first.verdict, first.lines[-1]) == (Verdict.FAIL, "divide by less")
    assert (second.verdict, second.lines) == (Verdict.SKIPPED, ("because of 'first'",))
    assert (third.verdict, third.lines) == (Verdict.WARN, ("three [of them]", "note: odd"))


def test_an_error_that_says_what_it_expected_gets_no_other_advice():
    def refuse() -> Any:
        raise ConfigError("too long", key="a.b", expected="a shorter one")

    with CheckRunner(silent()) as checkup:
        checkup.run("only", refuse, advice="call somebody")
    assert checkup.rows[0].lines == ("too long", "  key: a.b", "  expected: a shorter one")


def test_the_table_shows_texts_as_they_are():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(make_table([Row("a", Verdict.OK, ("[bold]x[/bold]",), 0.25)]))
    assert "[bold]x[/bold]" in console.export_text()


def test_the_table_cuts_no_text_short():
    console, path = Console(width=60, record=True, file=io.StringIO()), "/a" * 60
    console.print(make_table([Row("a", Verdict.FAIL, (path,), 0.25)]))
    lines = [line.split("│") for line in console.export_text().splitlines() if "│" in line]
    assert "".join(cells[3].strip() for cells in lines) == path


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
    assert first.startswith("pinning requires torch<1; installed: ")
    assert second == "pinning requires no-such-thing>=2; installed: none"
