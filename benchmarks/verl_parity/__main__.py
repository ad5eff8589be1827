"""Compare agentrl with verl 0.9.1, and fail on a difference that nobody declared.

    python -m benchmarks.verl_parity [advantages tokens losses correction ...]

from the root of the repository, in an environment that has both. verl pins versions that agentrl
does not share, so it goes in without its dependencies, into an environment of its own:

    python -m venv verl-parity && source verl-parity/bin/activate
    pip install -e . && pip install --no-deps verl==0.9.1
    pip install codetiming ray

and whatever else `python -c "import verl.trainer.ppo.core_algos"` then misses. Each module of this
folder has a function `check()` that gives lines of the table. A line is in order where the numbers
agree to 1e-5 relative and 1e-6 absolute, or where they differ and the line says why.
"""

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.verl_parity.comparison import Comparison


def modules() -> list[str]:
    """The parts of the comparison."""
    found = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return sorted(set(found) - {"__main__", "comparison", "batches"})


def print_table(lines: Sequence[Comparison]) -> None:
    width = max(len(line.name) for line in lines)
    print(f"{'name':{width}}  relative  absolute  verdict")
    for line in lines:
        print(f"{line.name:{width}}  {line.relative:8.1e}  {line.absolute:8.1e}  {line.verdict}")


def main(names: Sequence[str]) -> int:
    """Print the table. Returns the exit status."""
    warnings.simplefilter("ignore")  # the reference's own
    lines: list[Comparison] = []
    for name in names or modules():
        lines += importlib.import_module(f"benchmarks.verl_parity.{name}").check()
    print_table(lines)
    wrong = [line.name for line in lines if not line.is_as_declared]
    print(
        f"\n{len(lines)} comparisons, {len(wrong)} not as declared{': ' if wrong else ''}", end=""
    )
    print(", ".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
