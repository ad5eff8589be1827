"""Print the table of docs/trust.md: what each provider stops, measured on this machine, as root.

Run: python docs/make_trust_table.py, and put what it prints into the page.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.config.schema.sandbox import SandboxProviderName
from tests.fakes.probes import PROBES, Use, stopped

COLUMNS: dict[str, tuple[SandboxProviderName, Use]] = {
    "sandlock": ("sandlock", "session"),
    "bubblewrap": ("bubblewrap", "session"),
    "agent in bubblewrap": ("bubblewrap", "agent"),
    "subprocess": ("subprocess", "session"),
}
"""The provider and the use that are measured for each column."""
OPEN_WITHOUT_NAMESPACES = ("look_at_files", "look_at_processes", "change_outside")
"""Measured by the tests that are marked slow, which run as other users."""


def table() -> str:
    """Measure and lay out the table."""
    measured = [stopped(provider, use) for provider, use in COLUMNS.values()]
    columns = [*COLUMNS]
    columns.insert(1, "sandlock without namespaces")
    measured.insert(1, measured[0] | dict.fromkeys(OPEN_WITHOUT_NAMESPACES, False))
    lines = [f"| the code tries to | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
    for probe in PROBES:
        cells = ["stopped" if found[probe.name] else "open" for found in measured]
        lines.append(f"| {probe.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
