"""Rewrite the table in docs/from_verl.md from the key table: `python docs/make_verl_table.py`."""

import re
from pathlib import Path

from agentrl.config.verl.mapping import UNSET, KeyMapping, NoEffect, Rejected, Unsupported
from agentrl.config.verl.report import shown
from agentrl.config.verl.table import table as load_table

PAGE = Path(__file__).resolve().parent / "from_verl.md"
GIVEN = ("actor_rollout_ref.model.path", "data.train_files", "data.val_files")
"""Keys whose default in verl is a path of its authors, which is not taken."""
START, END = "<!-- the table: docs/make_verl_table.py -->", "<!-- end of the table -->"


def meaning(row: KeyMapping) -> str:
    """Return the last column of a row."""
    match row.outcome:
        case Rejected(why=why, allowed=allowed):
            values = ", ".join(dict.fromkeys(f"`{shown(value)}`" for value in allowed))
            return f"refused unless {values}: {why}"
        case Unsupported(why=why):
            return f"no counterpart: {why}"
        case NoEffect(why=why):
            return f"no effect in verl too: {why}"
        case None:
            return ", ".join(f"`{key}`" for key in row.ours) or "checked, or read with another key"


def table() -> str:
    """Return the whole table, in the order of `keys.yaml`."""
    lines = ["| verl's key | its default in 0.6.1 | here |", "| --- | --- | --- |"]
    for row in load_table():
        default = "" if row.default == UNSET else f"`{shown(row.default)}`"
        default = "a path, not taken" if row.name in GIVEN else default
        lines.append(f"| `{row.name}` | {default} | {meaning(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the table."""
    old = PAGE.read_text(encoding="utf-8")
    block = f"{START}\n\n{table()}\n\n{END}"
    PAGE.write_text(re.sub(f"{START}.*{END}", lambda _: block, old, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    main()
