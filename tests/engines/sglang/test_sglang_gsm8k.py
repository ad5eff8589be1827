"""Rows of the real GSM8K on the real SGLang: rollout, update, sync, and rollout again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.workers.distributed import stop_world
from tests.fakes.gsm8k import make_config, make_home, run_all_stages

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield make_home(tmp_path)
    stop_world()


def test_rows_sampled_by_sglang_go_all_the_way(home: Path):
    run_all_stages(
        make_config(
            home, "sampled", engine="sglang", max_tokens_per_turn=4, max_tool_response_length=64
        )
    )
