"""`torch.profiler` in chosen steps: a file for each step and rank."""

from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from agentrl.config.schema.run import ProfilerConfig, TrainerConfig
from agentrl.errors import ConfigError
from agentrl.workers.distributed import World

FOLDER = "profiles"
"""Subfolder of the run's folder."""


def find_idle_profiles(
    config: ProfilerConfig, *, total_steps: int, world_size: int
) -> Iterator[str]:
    """Yield a note for steps and ranks that the run does not have."""
    if steps := [step for step in config.steps if not 1 <= step <= total_steps]:
        yield f"trainer.profiler.steps: {steps} are not profiled; the last step is {total_steps}"
    if config.steps and (ranks := [one for one in config.ranks if not 0 <= one < world_size]):
        yield f"trainer.profiler.ranks: {ranks} are not profiled; the last rank is {world_size - 1}"


class StepProfiler:
    """Profiles the steps and ranks that `trainer.profiler` names. The other steps cost nothing.

    A file that cannot be written is reported, and the run continues.

    Args:
        config: The steps, the ranks, what is recorded, and the folder.
        world: This rank.
        report: Prints a line for the user.

    Raises:
        ConfigError: for `activities: [cuda]` on a CPU.
    """

    def __init__(self, config: TrainerConfig, world: World, report: Callable[[str], None]) -> None:
        self._config = config.profiler
        self._folder = config.profiler.folder or config.default_local_dir / FOLDER
        self._rank, self._report = world.rank, report
        has_cuda = world.device.type == "cuda" and torch.cuda.is_available()
        names = self._config.activities or (["cpu", "cuda"] if has_cuda else ["cpu"])
        if "cuda" in names and not has_cuda and self._config.steps:
            raise ConfigError(
                f"rank {world.rank} trains on {world.device.type}, so the profiler cannot record "
                "what CUDA does",
                key="trainer.profiler.activities",
                expected="cpu, or null",
            )
        known = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
        self._activities = [known[name] for name in names]
        self._running: profile | None = None

    def start(self, step: int, *, before_rollout: bool) -> None:
        """Start to profile, if this step and this part of it are to be profiled."""
        config = self._config
        if step not in config.steps or self._rank not in config.ranks:
            return
        if before_rollout is config.with_rollout:
            self._running = profile(activities=self._activities)
            self._running.start()

    def save(self, step: int) -> None:
        """End the profile of the step, if there is one, and write its file."""
        if (running := self._running) is None:
            return
        self.close()
        path = self._folder / f"step_{step:06d}_rank_{self._rank}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._report(f"note: the profile of step {step} was not written: {error}")
        else:
            self._report(f"profile: {path}")

    def close(self) -> None:
        """End a profile without a file, for a step that failed."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
