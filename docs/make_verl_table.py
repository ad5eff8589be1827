"""Rewrite the table in docs/from_verl.md from the mapping: `python docs/make_verl_table.py`."""

import re
from pathlib import Path

from agentrl.config.verl.mapping import UNSET, Dead, Left, Refused, Taken, VerlKey
from agentrl.config.verl.report import shown
from agentrl.config.verl.table import TABLE

PAGE = Path(__file__).resolve().parent / "from_verl.md"
GIVEN = ("actor_rollout_ref.model.path", "data.train_files", "data.val_files")
"""Keys whose default in verl is a path of its authors', which is not taken."""
START, END = "<!-- the table: docs/make_verl_table.py -->", "<!-- end of the table -->"


def what_becomes(row: VerlKey) -> str:
    """Say it in the words of the page."""
    match row.fate:
        case Taken(ours=ours):
            return ", ".join(f"`{key}`" for key in ours) or "checked, or read with another key"
        case Refused(harmless=harmless, why=why):
            values = ", ".join(dict.fromkeys(f"`{shown(value)}`" for value in harmless))
            return f"refused unless {values}: {why}"
        case Left(why=why):
            return f"no counterpart: {why}"
        case Dead(why=why):
            return f"dead there too: {why}"


def table() -> str:
    """Every row, in the table's order."""
    lines = ["| verl's key | its default in 0.6.1 | here |", "| --- | --- | --- |"]
    for row in TABLE:
        default = "" if row.default == UNSET else f"`{shown(row.default)}`"
        default = "a path, not taken" if row.name in GIVEN else default
        lines.append(f"| `{row.name}` | {default} | {what_becomes(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the table."""
    old = PAGE.read_text(encoding="utf-8")
    block = f"{START}\n\n{table()}\n\n{END}"
    PAGE.write_text(re.sub(f"{START}.*{END}", lambda _: block, old, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    main()
