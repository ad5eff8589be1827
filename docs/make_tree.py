"""Write the tree of folders into README, and that of all files: `python docs/make_tree.py`."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = """cli __main__.py commands doctor trainer quickstart compat workers collate.py algorithms
rewards rollout engines tools interactions data sandbox clients plugins answers.py config protocol
messages.py atomic_io.py validation_messages.py errors.py"""
"""From the top layer down."""
BESIDE = {
    "configs/tool_config/": "tools of the bundled examples, as YAML",
    "configs/interaction_config/": "interactions of the bundled examples",
    "examples/gsm8k_multiturn/": "the quick start, and the real GSM8K with a real model",
    "examples/tau_bench/": "an environment that exists already: 16 tools, 115 tasks, a user",
    "benchmarks/": "what is measured, as ratios of two things in one run",
    "docs/": "pages on what is in the code",
    "tests/": "mirrors agentrl/; `pytest` also runs linter, types and floors",
}


def places(name: str) -> tuple[list[Path], list[Path]]:
    """Find what stands on a floor: its doors (folders, or the file that it is), and its rooms."""
    floor = ROOT / "agentrl" / name
    if floor.suffix:
        return [floor], []
    doors = sorted(floor.rglob("__init__.py"), key=lambda door: door.parent)
    return doors, sorted(set(floor.rglob("*.py")) - set(doors), key=lambda p: (p.parent, p))


def first_sentence(module: Path) -> str:
    """What a module says it is for."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(":.")


def shown(module: Path) -> str:
    """Name a file as the tree does: a door by its folder."""
    name = str(module.relative_to(ROOT))
    return name.removesuffix("__init__.py")


def written(rows: dict[str, str]) -> str:
    """Write rows as a block of text."""
    width = max(map(len, rows)) + 2
    return (
        "```text\n" + "\n".join(f"{path:<{width}}{told}" for path, told in rows.items()) + "\n```"
    )


def trees() -> tuple[str, str]:
    """Write both trees: of folders, and of all files."""
    folders: dict[str, str] = {}
    files: dict[str, str] = {}
    for name in LAYERS.split():
        doors, rooms = places(name)
        listed = (door for door in doors if "compat/verl/" not in str(door.parent))
        folders |= {shown(door): first_sentence(door) for door in listed}
        files |= {shown(place): first_sentence(place) for place in sorted([*doors, *rooms])}
    return written(folders | BESIDE), written(files)


def main() -> None:
    """Write them."""
    folders, files = trees()
    readme = ROOT / "README.md"
    block = (
        "## The tree\n\nFrom the top floor down; a folder imports only from those below it. "
        f"Every file: [docs/tree.md](docs/tree.md).\n\n{folders}\n\n## Licence"
    )
    old = readme.read_text(encoding="utf-8")
    new = re.sub(r"## The tree.*## Licence", lambda _: block, old, flags=re.S)
    readme.write_text(new, encoding="utf-8")
    page = f"# Every file\n\nFrom the top floor down, by `docs/make_tree.py`.\n\n{files}\n"
    (ROOT / "docs/tree.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
