"""What every running SGLang is asked, wherever it runs."""

from collections.abc import Mapping
from typing import Any, Protocol

JsonFields = Mapping[str, Any]
"""Fields of a request or an answer, under SGLang's names."""


class Sampler(Protocol):
    """Who samples one completion: one running SGLang, or the next that can, of several."""

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Ask for one completion; cancelling it aborts it inside SGLang.

        Args:
            fields: Of `GenerateReqInput`.

        Returns:
            `output_ids` and `meta_info`.

        Raises:
            EngineError: where SGLang refuses it, fails, or is gone.
        """
        ...


class Backend(Sampler, Protocol):
    """One running SGLang: in this process's keep, or a server behind an address."""

    name: str
    """What an error calls it: `the SGLang engine`, or the server's address."""

    async def control(self, request: str, fields: JsonFields | None = None) -> None:
        """Ask for anything else, and wait until it is done.

        Args:
            request: As the server's routes name it: `flush_cache`, `abort_request`,
                `pause_generation`, `continue_generation`, `begin_weight_update`,
                `update_weights_from_tensor`, `end_weight_update`, ...
            fields: Of that request; tensors as serialized bytes.

        Raises:
            EngineError: where SGLang refuses it, fails, or is gone.
        """
        ...
