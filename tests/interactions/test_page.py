"""What `docs/interactions.md` shows works as it stands there."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from agentrl.clients.chat import ChatConfig
from agentrl.config.schema.reward import RewardWeightsConfig
from agentrl.config.schema.run import DataConfig, MultiTurnConfig
from agentrl.data.dataset import load_prompts
from agentrl.data.rows import Prompt
from agentrl.interactions import BaseInteraction, initialize_interactions_from_config
from agentrl.interactions.code_review_interaction import CodeReviewSettings
from agentrl.interactions.gsm8k_interaction import Gsm8kSettings
from agentrl.interactions.gym_interaction import GymInteraction, GymSettings
from agentrl.interactions.registry import select_interaction
from agentrl.interactions.user_simulator_interaction import UserSimulatorSettings
from agentrl.rewards.scoring import make_extra_info
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import make_context, make_engine, make_manager

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/interactions.md").read_text(encoding="utf-8")
CONFIGS = sorted((ROOT / "configs/interaction_config").glob("*_interaction_config.yaml"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


EXAMPLES = list(zip(blocks("yaml"), blocks("json"), strict=True))
GUESSER, SCORER, COUNTDOWN = blocks("python")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_users.py").write_text(GUESSER, encoding="utf-8")
    (tmp_path / "my_games.py").write_text(COUNTDOWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def load(here: Path, text: str, row: str) -> tuple[dict[str, BaseInteraction], Prompt]:
    (here / "users.yaml").write_text(text, encoding="utf-8")
    (here / "rows.jsonl").write_text(row, encoding="utf-8")
    (prompt,) = load_prompts([here / "rows.jsonl"], DataConfig())
    return initialize_interactions_from_config(here / "users.yaml"), prompt


def roll_out(
    interactions: dict[str, BaseInteraction], prompt: Prompt, *answers: str
) -> AsyncRolloutRequest:
    context = make_context(make_engine(*answers), interactions=[*interactions.values()])
    manager = make_manager(context, n=1)
    requests = manager.make_requests([prompt], manager.train_plan())

    async def main() -> AsyncRolloutRequest:
        try:
            return (await manager.rollout(requests))[0]
        finally:
            for interaction in interactions.values():
                await interaction.shutdown()

    return asyncio.run(main())


def said(request: AsyncRolloutRequest) -> list[str]:
    return [message.text for message in request.messages if message.role == "user"][1:]


def scores(request: AsyncRolloutRequest) -> list[Any]:
    return request.reward_scores["user_turn_rewards"]


def test_the_examples_to_write_are_short():
    assert max(len(text.splitlines()) for text in (GUESSER, SCORER, COUNTDOWN)) < 30


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_yaml_loads_and_its_row_selects_it(here: Path, example: tuple[str, str]):
    interactions, prompt = load(here, *example)
    (there,) = interactions.values()
    kwargs, source = prompt.interaction_kwargs, prompt.data_source
    assert select_interaction(interactions, kwargs, data_source=source) is there


def test_the_one_to_write_plays(here: Path):
    interactions, prompt = load(here, *EXAMPLES[0])
    request = roll_out(interactions, prompt, "5", "8", "7")
    assert said(request) == ["I think of a number below 10.", "Too low.", "Too high."]
    assert scores(request) == [0.0, 0.0, pytest.approx(1 / 3)]
    assert request.stop_reason is StopReason.INTERACTION_ENDED
    scorer: dict[str, Any] = {}
    exec(SCORER, scorer)
    total = scorer["compute_score"]("my/numbers", "7", "7", make_extra_info(request))
    assert total == pytest.approx(1 / 3)


def test_hints_of_the_gsm8k_row_are_given(here: Path):
    request = roll_out(*load(here, *EXAMPLES[1]), "#### 41", "#### 42")
    assert said(request)[0].endswith("Hint: It is more than 40.")
    assert scores(request) == [0.1, 0.8]


def test_the_lake_is_crossed(here: Path):
    request = roll_out(*load(here, *EXAMPLES[3]), "down", "down", "right", "down", "right", "right")
    assert said(request)[0] == "You stand on field 0.\n\nSFFF\nFHFH\nFFFH\nHFFG\n"
    assert scores(request) == [0.0] * 5 + [1.0]


def test_the_reviewer_says_what_the_page_shows(here: Path):
    wrong = "import os\na, b = map(int, input().split())\nprint(a * b + 1)"
    right = "print(sum(map(int, input().split())))"
    codes = [f"```python\n{code}\n```" for code in (wrong, right)]
    request = roll_out(*load(here, *EXAMPLES[4]), *codes)
    assert f"```\n{said(request)[0]}\n```" in PAGE
    assert scores(request) == [0.5, 1.0]
    assert request.stop_reason is StopReason.INTERACTION_ENDED


def test_the_weights_that_the_page_names_are_there():
    given = re.findall(r"reward\.weights: (\{.*?\})", PAGE)
    assert given
    for weights in given:
        RewardWeightsConfig.model_validate(yaml.safe_load(weights))


def test_an_environment_of_ones_own_plays(here: Path):
    game = GymInteraction({"name": "game", "env": "my_games:Countdown"})
    prompt = load(here, *EXAMPLES[0])[1].model_copy(
        update={"interaction_kwargs": {"name": "game", "env_kwargs": {"start": 2}}}
    )
    request = roll_out({"game": game}, prompt, "2", "<action>1</action>")
    assert said(request) == ["Count down from 2.", "Go on."]
    assert scores(request) == [1.0, 1.0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_we_ship_load(config: Path):
    assert len(initialize_interactions_from_config(config)) == 1


@pytest.mark.parametrize(
    "section", [Gsm8kSettings, UserSimulatorSettings, GymSettings, CodeReviewSettings]
)
def test_tables_list_every_key_with_its_default(section: type[BaseModel]):
    for name, field in section.model_fields.items():
        rows = re.findall(rf"^\| (?:`\w+`, )?`{name}`(?:, `\w+`)? \|(.*?)\|", PAGE, re.M)
        default = field.get_default(call_default_factory=True)
        if field.is_required() or default in ("", []):
            continue
        if isinstance(default, BaseModel):
            default = {}
        shown = default if isinstance(default, str) else json.dumps(default)
        assert shown in [row.strip().strip("`") for row in rows], name


def test_the_run_files_keys_are_listed_with_their_defaults():
    defaults = MultiTurnConfig().model_dump(mode="json")
    rows = re.findall(r"^\| `(interaction_\w+|max_\w+)` \| (.*?) \|", PAGE, re.M)
    listed = {name: json.loads(shown) for name, shown in rows if name in defaults}
    assert len(listed) == 5
    assert listed == {name: defaults[name] for name in listed}


def test_every_key_of_a_client_is_named():
    table = PAGE.partition("| key of `chat` |")[2].partition("\n\n")[0]
    names = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert set(ChatConfig.model_fields) == set(re.findall(r"`(\w+)`", "".join(names)))
