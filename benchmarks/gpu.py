"""Check and measure training on one device, in stages, each in its own process.

    python -m benchmarks.gpu                              # all stages on one GPU
    python -m benchmarks.gpu --stages packed,update
    python -m benchmarks.gpu --device cpu --small         # on a CPU, with tiny sizes, in a minute

A stage has ten minutes. A stage that fails, or takes longer, does not stop the others. The report
is `report.md` and `report.json` in the folder of `--out`, written after each stage; the output of
each stage is next to it. The exit status is the number of stages that failed. See
docs/benchmarks.md.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages import STAGES, Sizes

LIMIT_S = 600
_PACKAGES = ["torch", "transformers", "sglang", "flash-attn", "triton", "agentrl-multiturn"]
_MAX_ERROR_CHARS = 400
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Result:
    """What one stage found."""

    stage: str
    about: str
    status: str
    """`ok`, `failed`, `skipped`, or `timeout`."""
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, and return how many failed."""
    options = _parse(arguments)
    if options.stage:
        return run_here(options.stage, options.device, small=options.small, out=options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.stages.split(",") if options.stages else list(STAGES)
    if unknown := sorted(set(names) - STAGES.keys()):
        sys.exit(f"no such stage: {', '.join(unknown)}; the stages are {', '.join(STAGES)}")
    results: list[Result] = []
    for name in names:
        result = run_stage(
            name, options.device, small=options.small, out=options.out, limit_s=options.limit_s
        )
        results.append(result)
        print(f"{name}: {result.status} in {result.seconds:.0f} s {result.error}", flush=True)
        write_report(options.out, results, options.device)
    print(f"report: {options.out / 'report.md'}")
    return sum(result.status in ("failed", "timeout") for result in results)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--stages", help=f"names with commas between; all: {', '.join(STAGES)}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the report")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the stages")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of one stage")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_stage(name: str, device: str, *, small: bool, out: Path, limit_s: float) -> Result:
    """Run a stage in a process of its own, which is killed with its children at the limit."""
    file, log = out / f"{name}.json", out / f"{name}.log"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", name, "--device", device]
    command += ["--out", str(out), *(["--small"] if small else [])]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    begun, is_late = time.monotonic(), False
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
            env=environment,
        )  # fmt: skip
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begun
    if is_late:
        result = {"status": "timeout", "error": f"not done after {limit_s:g} s; see {log.name}"}
    elif file.is_file():
        result = json.loads(file.read_text())
    else:
        error = f"ended with status {process.returncode}: {_tail(log)}"
        result = {"status": "failed", "error": error}
    return Result(name, STAGES[name].about, seconds=seconds, **result)


def run_here(name: str, device: str, *, small: bool, out: Path) -> int:
    """Run a stage in this process, and write its result."""
    sizes = Sizes.small() if small else Sizes()
    out = out.resolve()
    result: dict[str, Any] = {"status": "ok"}
    try:
        result["figures"] = STAGES[name].run(device, sizes, out / name)
    except ModuleNotFoundError as error:
        result = {"status": "skipped", "error": f"{error.name} is not installed"}
    except Exception as error:  # noqa: BLE001 - written to the report
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        result = {"status": "failed", "error": text[:_MAX_ERROR_CHARS]}
    (out / f"{name}.json").write_text(json.dumps(result))
    return 0


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " ".join(lines[-3:])[-_MAX_ERROR_CHARS:]


def write_report(out: Path, results: Sequence[Result], device: str) -> None:
    """Write `report.json` and `report.md`."""
    machine = describe_machine(device)
    report = {"machine": machine, "stages": [asdict(result) for result in results]}
    (out / "report.json").write_text(json.dumps(report, indent=1))
    lines = ["# Training on one device", "", *(f"- {key}: {machine[key]}" for key in machine), ""]
    lines += ["| stage | status | seconds | error |", "| --- | --- | --- | --- |"]
    for one in results:
        error = one.error.replace("|", "\\|")
        lines.append(f"| {one.stage} | {one.status} | {one.seconds:.0f} | {error} |")
    for one in results:
        if one.figures:
            lines += [
                "",
                f"## {one.stage}",
                "",
                one.about,
                "",
                "| what | figure |",
                "| --- | --- |",
            ]
            lines += [f"| {name} | {_show(value)} |" for name, value in one.figures.items()]
    (out / "report.md").write_text("\n".join(lines) + "\n")


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe_machine(device: str) -> dict[str, str]:
    """Describe versions, device and load."""
    found = {"python": platform.python_version(), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    found["load"] = " ".join(f"{load:.1f}" for load in os.getloadavg())
    if device == "cuda":
        import torch

        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory
            found["device"] = f"{torch.cuda.get_device_name(0)}, {memory / 2**30:.0f} GiB"
    return found


if __name__ == "__main__":
    sys.exit(main())
