"""The bundled loop with one completion."""

from typing import Any
from uuid import uuid4

from agentrl.agent_loops.base import AgentLoopBase
from agentrl.agent_loops.output import AgentLoopOutput


class SingleTurnAgentLoop(AgentLoopBase):
    """Render the prompt, sample one answer, and end. The row's tools are not shown."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Sample one answer."""
        media = await self.process_vision_info(kwargs["raw_prompt"])
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        output = await self.server_manager.generate(
            uuid4().hex,
            prompt_ids=prompt_ids,
            sampling_params=sampling_params,
            image_data=media.get("images"),
            video_data=media.get("videos"),
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            multi_modal_data=media,
            num_turns=2,
            extra_fields=output.extra_fields,
        )
