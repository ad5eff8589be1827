"""64 agent loops at once, many of them bad: each costs its own request only."""

import asyncio
from typing import Any

from agentrl.agent_loops import AgentLoopBase, AgentLoopOutput
from agentrl.agent_loops.registry import LoopEntry
from agentrl.agent_loops.runner import AgentLoopRunner
from agentrl.config.schema.run import RunConfig
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import make_context, make_engine, make_prompts, tiny_tokenizer

BAD = ("raises", "exits", "hangs", "cancels", "forges", "returns nothing", "ignores cancelling",
       "leaves tasks", "floods")  # fmt: skip


class AnyLoop(AgentLoopBase):
    """Does what the row's column `deed` says."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        ids = await self.apply_chat_template(kwargs["raw_prompt"])

        async def call() -> Any:
            return await self.server_manager.generate(
                "a", prompt_ids=ids, sampling_params=sampling_params
            )

        output = await call()
        tokens = list(output.token_ids)
        match kwargs["deed"]:
            case "raises":
                raise LookupError("no such thing")
            case "exits":
                raise SystemExit(1)
            case "cancels":
                raise asyncio.CancelledError
            case "hangs":
                await asyncio.Event().wait()
            case "ignores cancelling":
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    await asyncio.sleep(1.5)  # longer than the time to clean up
            case "forges":
                tokens[0] = 40
            case "returns nothing":
                return None
            case "leaves tasks":
                self.tasks = [asyncio.create_task(call()) for _ in range(4)]
                raise LookupError("left")
            case "floods":
                await asyncio.gather(*(call() for _ in range(200)))
                tokens = tokens * 5000
        mask = [1] * len(tokens)
        return AgentLoopOutput(prompt_ids=ids, response_ids=tokens, response_mask=mask)


async def test_64_loops_with_bad_ones_among_them():
    config = RunConfig.model_validate(
        {
            "data": {},
            "model": {"path": "policy"},
            "rollout": {"agent": {"loop_timeout_s": 0.5}, "request_timeout_s": 3, "n": 1},
        }
    )
    context = make_context(make_engine("Fine."))
    runner = AgentLoopRunner(LoopEntry("any", AnyLoop), config, tiny_tokenizer())
    manager = RolloutManager(context, config.rollout, config.data, runner)
    deeds = [BAD[n] if n < len(BAD) else "fine" for n in range(64)]
    prompts = [p for deed in deeds for p in make_prompts(1, columns={"deed": deed})]
    requests = manager.make_requests(prompts, manager.train_plan())
    done = await asyncio.wait_for(manager.drive(requests), 20)
    for deed, request in zip(deeds, done, strict=True):
        expected = StopReason.ANSWERED if deed == "fine" else StopReason.FAILED
        assert request.stop_reason is expected, (deed, request.error)
        assert request.is_trained is (deed == "fine")
