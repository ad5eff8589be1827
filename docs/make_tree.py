"""Rewrite the tree in README from the modules: `python docs/make_tree.py`."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = """cli __main__.py trainer training collate.py algorithms rewards rollout engines tools
interactions data sandbox chat_client.py plugins answers.py
config protocol messages.py files.py errors.py __init__.py"""
BESIDE = {
    "configs/tool_config/": "tools of the bundled examples, as YAML",
    "configs/interaction_config/": "interactions of the bundled examples",
    "examples/gsm8k_multiturn/": "the quick start, and the real GSM8K with a real model",
    "benchmarks/": "what is measured, as ratios of two things in one run",
    "docs/": "pages on what is in the code",
    "tests/": "mirrors agentrl/; `pytest` also runs linter, types and floors",
}


def modules() -> list[Path]:
    """Every module, from the top floor down; a package's door before its rooms."""
    found: list[Path] = []
    for name in FLOORS.split():
        place = ROOT / "agentrl" / name
        inside = sorted(place.rglob("*.py"), key=lambda p: (p.parent, p.name != "__init__.py", p))
        found += inside or [place]
    return found


def first_sentence(module: Path) -> str:
    """What a module says it is for."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(":.")


def main() -> None:
    """Write the tree."""
    rows = {str(module.relative_to(ROOT)): first_sentence(module) for module in modules()} | BESIDE
    width = max(map(len, rows)) + 2
    tree = "\n".join(f"{path:<{width}}{text}" for path, text in rows.items())
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    block = f"## The tree\n\n```text\n{tree}\n```\n\n## Licence"
    readme.write_text(re.sub(r"## The tree.*## Licence", lambda _: block, old, flags=re.S))


if __name__ == "__main__":
    main()
