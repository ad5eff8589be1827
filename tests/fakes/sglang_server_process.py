"""A process that speaks SGLang's routes: `python -m ... PARENT`, with arguments on its stdin."""

import asyncio
import json
import sys

from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.processes import end_with
from agentrl.engines.sglang.servers.launch import ServeOptions, ServerPlan, choose_ports
from tests.fakes.sglang_servers import FakeSGLang


class FakePlan(ServerPlan):
    """How to start it."""

    @property
    def command(self) -> list[str]:
        own = super().command
        own[2] = __name__
        return own


def plan_fakes(needs: SGLangNeeds, options: ServeOptions) -> list[ServerPlan]:
    """The plan of one server, in the place of SGLang's."""
    return [
        FakePlan(host=options.host, port=port, arguments={"api_key": needs.api_key})
        for port in choose_ports(options)
    ]


async def serve() -> None:
    """Answer until the process that started this one ends."""
    arguments = json.load(sys.stdin)
    server = FakeSGLang(
        port=arguments["port"],
        host=arguments["host"],
        first_version=arguments["weight_version"],
        api_key=arguments["api_key"],
    )
    await server.start()
    print("the fake server answers", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    asyncio.run(serve())
