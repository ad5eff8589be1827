"""Records that driver and training ranks exchange. Nothing here needs Ray."""

from dataclasses import dataclass
from typing import Literal

from agentrl.errors import AgentRLError


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How the work of a rank ended."""

    kind: Literal["done", "interrupted", "failed", "lost"]
    """lost: the process died, or lost the other ranks in a collective."""
    text: str = ""
    """The error, or the summary."""
    exit_code: int = 0
    is_cause: bool = True
    """False for the error of a rank that only lost the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """What a rank needs to join the others."""

    rank: int
    world_size: int
    local_rank: int
    """Index of its device among those that its process sees."""
    address: str
    """Address of the main rank's node."""
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torchrun sets."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class RankFailedError(AgentRLError, RuntimeError):
    """A rank ended with an error. The rank has printed it."""

    def __init__(self, end: RankEnd) -> None:
        super().__init__(end.text)
        self.exit_code = end.exit_code
