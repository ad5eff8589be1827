"""README and documents say what is."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import typer

from agentrl.cli import app
from agentrl.config import load_config
from agentrl.config.tables import load_table
from agentrl.rollout.states import StopReason
from agentrl.trainer.components import needs_critic

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["gsm8k", "quickstart", "ppo", "ppo_quickstart", "lora", "lora_quickstart"]
)
def test_run_files_of_the_example_load(name: str) -> None:
    config = load_config(ROOT / f"examples/gsm8k_multiturn/{name}.yaml")
    assert needs_critic(config) == name.startswith("ppo")
    assert config.model.has_lora == name.startswith("lora")


def test_page_of_requests_has_every_end() -> None:
    text = (ROOT / "docs/requests.md").read_text(encoding="utf-8")
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


def test_page_of_memory_is_the_arithmetic_of_the_doctor() -> None:
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert load("make_memory").page() == page, "python docs/make_memory.py"


def test_pages_of_the_reference_are_those_of_the_code() -> None:
    folder = ROOT / "docs/reference"
    found = {str(p.relative_to(folder)): p.read_text("utf-8") for p in folder.rglob("*.md")}
    assert load("make_reference").pages() == found, "python docs/make_reference.py"


def test_figures_of_the_concepts_are_what_the_code_computes() -> None:
    folder = ROOT / "docs/concepts/figures"
    drawn = load("make_figures").figures()
    assert {file.name for file in folder.glob("*.svg")} == drawn.keys()
    for name, figure in drawn.items():
        assert (folder / name).read_text(encoding="utf-8") == figure, "python docs/make_figures.py"


def test_the_facts_about_methods_are_those_of_their_registrations():
    written = load_table(ROOT / "agentrl/config/methods.yaml")
    assert written == load("make_methods").methods(), "python docs/make_methods.py"


def test_lists_of_packages_and_files_are_complete() -> None:
    maker = load("make_tree")
    folders, files = maker.trees()
    assert folders in (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), "make docs"
    assert files in (ROOT / "docs/tree.md").read_text(encoding="utf-8"), "python docs/make_tree.py"
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "agentrl").rglob("*.py")}
    named = set(re.findall(r"^(agentrl/[\w/.]+)", files, re.M))
    assert named == {path.removesuffix("__init__.py") for path in there} - {"agentrl/"}
    assert not re.findall(r"^agentrl/\S+$", files, re.M), "a file without a docstring"


def readme_command(name: str) -> str:
    blocks = re.findall(rf"^<!-- command: {name} -->\n```bash\n(.*?)^```", README, re.M | re.S)
    assert len(blocks) == 1
    return blocks[0]


def test_commands_that_ci_takes_from_the_readme_are_marked() -> None:
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert re.findall(r"^run_readme_command (\w+)$", ci, re.M) == ["test", "sglang"]
    assert "agentrl train examples/gsm8k_multiturn/quickstart.yaml" in readme_command("train")
    assert '-e ".[dev,agents]" && make test' in readme_command("test")
    assert '-e ".[sglang,dev]" && make test-sglang' in readme_command("sglang")


def test_tasks_that_pages_name_are_in_the_makefile() -> None:
    tasks = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page in [*PAGES, ROOT / ".ci/run"]:
        for named in re.findall(r"(?:^|[`&] ?|\$ )make ([a-z -]+)", page.read_text("utf-8"), re.M):
            assert set(named.split()) <= tasks, page


def test_tests_that_the_page_of_invariants_names_exist() -> None:
    page = (ROOT / "docs/invariants.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) >= 13
    for file, name in named:
        assert re.search(rf"def {name}\b", (ROOT / file).read_text(encoding="utf-8")), name


def test_files_of_the_walk_exist_and_are_few() -> None:
    page = (
        (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## From weights")[0]
    )
    walk = dict.fromkeys(re.findall(r"`(agentrl/[\w/]+\.py)`", page))
    assert 10 <= len(walk) <= 25
    assert all((ROOT / file).is_file() for file in walk)


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_paths_that_are_type_checked_strictly_exist() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for path in settings["tool"]["pyright"]["strict"]:
        found = ROOT / path
        assert found.is_file() if found.suffix else any(found.rglob("*.py")), path


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_pages_name_only_commands_that_exist() -> None:
    commands = typer.main.get_command(app)
    known = set(commands.commands)  # pyright: ignore[reportAttributeAccessIssue]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^|[`&] ?)agentrl ([a-z][a-z-]*)", text, re.M))
        assert named <= known, f"{page.relative_to(ROOT)}: {sorted(named - known)}"


def test_no_page_leads_to_the_project_that_owns_the_name_agentrl_on_the_index() -> None:
    files = [*PAGES, *(ROOT / "configs").rglob("*.yaml"), *(ROOT / "agentrl").rglob("*.py")]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"install (?:-\S+ )*[\"']?agentrl(?![-/\w])", text), file
