"""The bundled loop with one completion."""

from typing import Any
from uuid import uuid4

from agentrl.agent_loops.base import AgentLoopBase
from agentrl.agent_loops.output import AgentLoopOutput


class SingleTurnAgentLoop(AgentLoopBase):
    """Render the prompt, sample one answer, and end. The row's tools are not shown."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Sample one answer."""
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        output = await self.server_manager.generate(
            uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
            extra_fields=output.extra_fields,
        )
