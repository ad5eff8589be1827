"""docs/roles.md: its tables are those of the code, and its run files load."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from agentrl.algorithms import adv_estimator_names, get_adv_estimator_fn
from agentrl.config import check_config, parse_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/roles.md").read_text(encoding="utf-8")
RUN_FILES = dict(re.findall(r"^<!-- (\w+\.yaml) -->\n```yaml\n(.*?)^```", PAGE, re.M | re.S))


def test_the_tables_are_up_to_date(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    assert import_module("make_roles").page(PAGE) == PAGE, "python docs/make_roles.py"


def test_every_bundled_estimator_is_in_the_table():
    names = adv_estimator_names()
    bundled = [n for n in names if get_adv_estimator_fn(n).__module__.startswith("agentrl.")]
    assert all(f"`{name}`" in PAGE for name in bundled)


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_file_of_the_page_loads(name: str):
    check_config(parse_config(yaml.safe_load(RUN_FILES[name])))


def test_the_page_has_run_files():
    assert {"judge.yaml", "reward_model.yaml", "reference.yaml"} <= RUN_FILES.keys()


def test_a_run_file_of_the_page_asks_for_its_role():
    configs = {n: parse_config(yaml.safe_load(text)) for n, text in RUN_FILES.items()}
    assert configs["reward_model.yaml"].reward.model is not None
    assert configs["reference.yaml"].actor.use_kl_loss
    assert configs["judge.yaml"].reward.functions[0].name == "judge"
