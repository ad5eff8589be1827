"""What a tool shows in pictures is kept, though only text is generated on."""

import asyncio

from agentrl.messages import ToolResponse
from tests.fakes import FakeTool, calling, make_engine, make_house, make_manager, make_prompts


def test_images_of_a_tool_are_kept_on_its_call() -> None:
    answer = ToolResponse(text="a map", image=["PIXELS"])
    tool = FakeTool(reply=lambda _: answer)
    house = make_house(make_engine(calling("lookup", q="x"), "Seen."), tools=[tool])
    manager = make_manager(house, n=1)
    requests = manager.make_requests(make_prompts(1), manager.train_plan())
    request = asyncio.run(manager.rollout(requests))[0]
    call = request.turns[0].calls[0]
    assert (call.image, call.video, call.outcome) == (["PIXELS"], None, "ok")
    saved = type(request).model_validate(request.model_dump(mode="json"))
    assert saved.turns[0].calls[0].image == ["PIXELS"]
