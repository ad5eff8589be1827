"""README and documents say what is."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import typer

from agentrl.cli import app
from agentrl.config.method_keys import INPUTS_NOT_MADE
from agentrl.rollout.states import StopReason, state_diagram

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_diagram_is_the_table() -> None:
    text = (ROOT / "docs/requests.md").read_text(encoding="utf-8")
    assert state_diagram() in text
    assert all(f"| `{reason}` |" in text for reason in StopReason)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    return maker


def test_table_of_verls_keys_is_the_mapping() -> None:
    maker = load("make_verl_table")
    text = (ROOT / "docs/from_verl.md").read_text(encoding="utf-8")
    assert maker.table() in text, "python docs/make_verl_table.py"


def test_page_of_keys_is_the_schema_and_says_what_each_key_means() -> None:
    page = (ROOT / "docs/keys.md").read_text(encoding="utf-8")
    assert load("make_keys").page() == page, "python docs/make_keys.py"
    assert not re.findall(r"^\| `[\w.]+` .*\|  \|$", page, re.M)


def test_trees_are_those_of_the_folders_and_files() -> None:
    maker = load("make_tree")
    folders, files = maker.trees()
    assert folders in README, "python docs/make_tree.py"
    assert files in (ROOT / "docs/tree.md").read_text(encoding="utf-8"), "python docs/make_tree.py"
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "agentrl").rglob("*.py")}
    named = set(re.findall(r"^(agentrl/[\w/.]+)", files, re.M))
    doors = {path.removesuffix("__init__.py") for path in there} - {"agentrl/"}
    assert named == doors
    assert not re.findall(r"^agentrl/\S+$", files, re.M), "a file without a docstring"


def test_python_of_the_readme_is_python() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(blocks) >= 2
    for block in blocks:
        ast.parse(block)


def test_first_two_commands_install_and_train_and_test() -> None:
    train, test = re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S)[:2]
    assert "pip install" in train
    assert "agentrl train examples/gsm8k_multiturn/quickstart.yaml" in train
    assert "pip install" in test
    assert "&& pytest -n logical --dist worksteal && pytest -m slow" in test


def test_third_command_installs_sglang_and_ci_runs_it() -> None:
    command = re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S)[2]
    assert ".[sglang,dev]" in command
    assert "pytest -m sglang" in command
    assert "for block in blocks[1:3]" in (ROOT / ".ci/run").read_text()


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_pages_name_only_commands_that_exist() -> None:
    commands = typer.main.get_command(app)
    known = set(commands.commands)  # pyright: ignore[reportAttributeAccessIssue]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^|[`&] ?)agentrl ([a-z][a-z-]*)", text, re.M))
        assert named <= known, f"{page.relative_to(ROOT)}: {sorted(named - known)}"


def test_pages_say_which_estimators_no_run_can_use() -> None:
    for name in INPUTS_NOT_MADE.keys() - {"gae_verl"}:
        rows = [
            line
            for page in PAGES
            if page.parent.name == "algorithms"
            for line in page.read_text(encoding="utf-8").splitlines()
            if line.startswith(f"| [`{name}`](#")
        ]
        assert rows
        assert all("not in a run yet" in row for row in rows), name


def test_no_page_leads_to_the_project_that_owns_the_name_agentrl_on_the_index() -> None:
    files = [*PAGES, *(ROOT / "configs").rglob("*.yaml"), *(ROOT / "agentrl").rglob("*.py")]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"install (?:-\S+ )*[\"']?agentrl(?![-/\w])", text), file


def test_readme_has_no_gap() -> None:
    assert "@@" not in README
