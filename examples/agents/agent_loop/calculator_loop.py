"""The quick start's agent as an agent loop: call the calculator, then answer."""

import json
import re

from agentrl.agent_loops import AgentLoopBase, AgentLoopOutput, register
from agentrl.rewards.gsm8k import compute_score
from agentrl.tools.calculator_tool import calculate

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MAX_TURNS = 6


@register("calculator_agent")
class CalculatorLoop(AgentLoopBase):
    """Samples a turn, answers its tool call, and so on; it rewards right answers itself."""

    def __init__(self, *args, tools, **kwargs):
        super().__init__(*args, **kwargs)
        self.schemas = [tool.tool_schema.to_template() for tool in tools.tools]

    async def run(self, sampling_params, **row):
        """Drive one problem."""
        ids = await self.apply_chat_template(row["raw_prompt"], tools=self.schemas)
        num_prompt, mask, num_answered = len(ids), [], 0
        for _ in range(MAX_TURNS):
            output = await self.server_manager.generate(
                "calculator", prompt_ids=ids, sampling_params=sampling_params
            )
            ids, mask = ids + output.token_ids, mask + [1] * len(output.token_ids)
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            call = CALL.search(text)
            if call is None:
                break
            try:
                result = calculate(json.loads(call[1])["arguments"]["expression"])
                num_answered += 1
            except (ValueError, KeyError, TypeError, RuntimeError) as error:  # the policy's mistake
                result = f"Error: {error}"[:100]
            reply = [{"role": "tool", "content": result, "name": "calculator"}]
            new = await self.apply_chat_template(
                reply, tools=self.schemas, remove_system_prompt=True
            )
            if len(mask) + len(new) >= self.rollout_config.response_length:
                break
            ids, mask = ids + new, mask + [0] * len(new)
        info = {"num_tool_calls": {"calculator": num_answered}}
        truth = row["reward_model"]["ground_truth"]
        score = compute_score("", text, truth, info, require_tool=True)
        return AgentLoopOutput(
            prompt_ids=ids[:num_prompt],
            response_ids=ids[num_prompt:],
            response_mask=mask,
            reward_score=score["score"],
        )
