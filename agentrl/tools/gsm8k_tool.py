"""Score the policy's answers to a GSM8K problem."""

import uuid
from typing import Any

from agentrl.answers import extract_gsm8k_answer, read_number, same_number
from agentrl.config.schema.section import PenaltyAsReward, Section
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.tools.base import ToolResult
from agentrl.tools.bundled import BundledTool, function_schema, string_parameter


class Gsm8kToolConfig(Section):
    """The own keys of `Gsm8kTool`."""

    repeat_penalty: PenaltyAsReward = -0.05
    """Reward of a call whose answer scores no better than the previous one."""


class Gsm8kTool(BundledTool):
    """Score answers against the ground truth.

    A call's reward is 0.0 if its answer scores better than the previous one, else
    `config.repeat_penalty` (default -0.05). The tool's own reward is the last answer's score.
    `create_kwargs`: `ground_truth`. A subclass that has more keys names them by its `keys_class`.
    """

    keys_class: type[Gsm8kToolConfig] = Gsm8kToolConfig
    default_schema = function_schema(
        "calc_gsm8k_reward",
        "Score an answer to the problem: 1.0 if it is right, 0.0 if it is not.",
        answer=string_parameter("The answer: a number, without unit."),
    )

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self._truths: dict[str, str] = {}
        self._scores: dict[str, float] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Store the right answer of one request.

        Raises:
            RewardError: If it is missing, or `judge` cannot compare with it.
        """
        instance_id = instance_id or uuid.uuid4().hex
        self._truths[instance_id] = self.read_truth(ground_truth)
        self._scores[instance_id] = 0.0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Score an answer."""
        answer = str(parameters.get("answer", ""))
        number, score = self.judge(answer, self._truths[instance_id])
        reward = 0.0 if score > self._scores[instance_id] else self._keys.repeat_penalty
        self._scores[instance_id] = score
        response = ToolResponse(text=self.describe(answer, number, score))
        return ToolResult(response, reward, {"score": score})

    def read_truth(self, ground_truth: Any) -> str:
        """Return a right answer as `judge` gets it.

        Raises:
            RewardError: If `judge` cannot compare with it.
        """
        return read_number(ground_truth)

    def judge(self, answer: str, ground_truth: str) -> tuple[str, float]:
        """Return the number in an answer (empty if there is none) and its score."""
        number = extract_gsm8k_answer(answer) or extract_gsm8k_answer(answer, "flexible") or ""
        return number, float(same_number(number, ground_truth))

    def describe(self, answer: str, number: str, score: float) -> str:
        """Return a score as text for the policy."""
        return f"The answer {number} is scored {score}." if number else "There is no number in it."

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """Return the last answer's score; 0.0 if none was scored."""
        return self._scores[instance_id]

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Forget the request."""
        self._truths.pop(instance_id, None)
        self._scores.pop(instance_id, None)
