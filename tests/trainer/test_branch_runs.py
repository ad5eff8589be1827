"""Trajectories of several sequences, trained on two ranks and on one, with and without a critic."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runs import read_lines, write_yaml
from tests.fakes.torchrun import ranks_of
from tests.trainer.test_two_ranks import CLOCKS, changes_for, run_file, train_alone

LOOP = """
from agentrl.agent_loops import AgentLoopBase, AgentLoopOutput


class Parts(AgentLoopBase):
    async def run(self, sampling_params, **row):
        outputs = []
        for part in range(1 + row["index"] % 3):
            said = {"role": "user", "content": f"part {part}"}
            ids = await self.apply_chat_template([*row["raw_prompt"], said][-(1 + part % 2):])
            found = await self.server_manager.generate(
                f"part {part}", prompt_ids=ids, sampling_params=sampling_params
            )
            mask = [1] * len(found.token_ids)
            outputs.append(AgentLoopOutput(
                prompt_ids=ids, response_ids=found.token_ids, response_mask=mask
            ))
        return outputs
"""
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gae": {"algorithm__adv_estimator": "gae", "critic__ppo_mini_batch_size": None},
}


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("setting", SETTINGS)
def test_layout_is_invisible_two_ranks_train_branches_as_one_does(
    tiny_home: Path, tmp_path: Path, setting: str
):
    (tmp_path / "loop.py").write_text(LOOP)
    entry = {"name": "parts", "_target_": f"{tmp_path}/loop.py:Parts"}
    agent = {
        "default_agent_loop": "parts",
        "agent_loop_config_path": str(write_yaml(tmp_path / "loops.yaml", [entry])),
    }
    file = run_file(
        tiny_home, tmp_path, rollout__agent=agent, trainer__total_training_steps=2,
        data__val_files=None, **SETTINGS[setting],
    )  # fmt: skip
    alone, together = tmp_path / "alone", tmp_path / "together"
    with ranks_of("agentrl", "train", str(file), *changes_for(together)) as ranks:
        train_alone(file, *changes_for(alone))
        outputs = [rank.wait() for rank in ranks]
    assert [rank.code for rank in outputs] == [0, 0], "\n".join(rank.err for rank in outputs)
    one, two = (read_lines(folder / "metrics.jsonl") for folder in (alone, together))
    assert [line["step"] for line in one] == [line["step"] for line in two] == [1, 2]
    for of_one, of_two in zip(one, two, strict=True):
        assert of_one["rollout/sequences/max"] > 1
        assert of_one["actor/grad_norm"] > 0
        names = [name for name in of_one if not name.startswith(CLOCKS) and "seconds" not in name]
        assert {name: of_two[name] for name in names} == pytest.approx(
            {name: of_one[name] for name in names}, rel=1e-5, abs=1e-5
        )
    assert (setting == "gae") == ("critic/vf_loss" in one[0])
