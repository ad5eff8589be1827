"""Write the list of packages and the list of all files: `python docs/make_tree.py`."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = """cli __main__.py commands doctor viewer trainer cluster quickstart compat workers
collate.py algorithms rewards agent_loops rollout engines tools interactions data sandbox clients
media answers.py plugins config protocol messages.py remote_io.py atomic_io.py
validation_messages.py given_texts.py progress.py errors.py"""
"""From the top layer down."""
OUTSIDE = {
    "configs/tool_config/": "tools of the bundled examples, as YAML",
    "configs/interaction_config/": "interactions of the bundled examples",
    "examples/agents/": "agents of users: an agent loop, programs, frameworks",
    "examples/geo3k_multiturn/": "the real Geometry3K with a real vision-language model",
    "examples/gsm8k_multiturn/": "the quick start, and the real GSM8K with a real model",
    "examples/pictures/": "the quick start with pictures: a small policy learns to zoom in",
    "examples/tau_bench/": "an existing environment: 16 tools, 115 tasks, a simulated user",
    "benchmarks/": "measurements, as ratios of two things in one run",
    "docs/": "documentation, and the scripts that write its generated pages",
    "tests/": "tests; `tests/a/test_b.py` tests `agentrl/a/b.py`, `tests/fakes/` is shared",
}
MARK = "<!-- packages: written by docs/make_tree.py -->"


def find_modules(layer: str) -> tuple[list[Path], list[Path]]:
    """Return the packages of a layer (or the file that it is), and its other modules."""
    path = ROOT / "agentrl" / layer
    if path.suffix:
        return [path], []
    packages = sorted(path.rglob("__init__.py"), key=lambda package: package.parent)
    modules = set(path.rglob("*.py")) - set(packages)
    return packages, sorted(modules, key=lambda p: (p.parent, p))


def first_sentence(module: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(":.")


def shown(module: Path) -> str:
    """Return the module's path; a package's is its folder."""
    return str(module.relative_to(ROOT)).removesuffix("__init__.py")


def as_block(rows: dict[str, str]) -> str:
    """Return paths and descriptions as a block of text."""
    width = max(map(len, rows)) + 2
    lines = "\n".join(f"{path:<{width}}{text}" for path, text in rows.items())
    return f"```text\n{lines}\n```"


def trees() -> tuple[str, str]:
    """Return both lists: packages, and all files."""
    folders: dict[str, str] = {}
    files: dict[str, str] = {}
    for layer in LAYERS.split():
        packages, modules = find_modules(layer)
        folders |= {shown(package): first_sentence(package) for package in packages}
        files |= {shown(path): first_sentence(path) for path in sorted([*packages, *modules])}
    return as_block(folders | OUTSIDE), as_block(files)


def main() -> None:
    """Write both lists."""
    folders, files = trees()
    page = ROOT / "docs/architecture.md"
    above, _, _ = page.read_text(encoding="utf-8").partition(MARK)
    page.write_text(f"{above}{MARK}\n\n{folders}\n", encoding="utf-8")
    head = "# Every file\n\nFrom the highest layer to the lowest, by `docs/make_tree.py`."
    (ROOT / "docs/tree.md").write_text(f"{head}\n\n{files}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
