"""Print the table of docs/trust.md: what each provider stops, measured on this machine, as root.

Run: python docs/make_trust_table.py, and put what it prints into the page.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fakes_probes import PROBES, stopped

PROVIDERS = ("sandlock", "bubblewrap", "subprocess")


def table() -> str:
    """Measure and lay out the table."""
    measured = [stopped(provider) for provider in PROVIDERS]
    lines = [f"| the code tries to | {' | '.join(PROVIDERS)} |", "| --- | --- | --- | --- |"]
    for probe in PROBES:
        cells = ["stopped" if found[probe.name] else "open" for found in measured]
        lines.append(f"| {probe.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
