"""Stories that a scripted policy plays with any chat template, and what the ledger then is.

    python -m tests.fakes.template_stories TOKENIZER TEMPLATE.jinja ...

prints the verdict of each story with each template, and their counts. The policy writes a turn as
the template itself writes it in a rendering of the story. So if a template only appends, the ledger
is the rendering of the whole story.
"""

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentrl.engines.protocol import SamplingParams
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import AgentRLError, TemplateError
from agentrl.messages import Message
from agentrl.rollout.context import choose_parser
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import RequestState
from agentrl.rollout.templates import (
    ChatTemplate,
    TemplateNeeds,
    TemplateReport,
    probe_template,
    require,
)
from agentrl.rollout.templates.cutting import common_length
from agentrl.rollout.tool_calls import ToolCaller
from tests.fakes.plugins import FakeTool, FakeUser, make_context, make_request

CONTROL = re.compile(
    r"<\|[A-Za-z0-9_]+\|>|<｜[^｜<>]+｜>|\[gMASK\]|<sop>|<(?:start|end)_of_turn>"
    r"|</?(?:tool_response|arg_key|arg_value)>|\[/?[A-Z_]{3,40}\]|<\|\w{1,40}>|<\w{1,40}\|>"
)
TAGS = re.compile(f"{CONTROL.pattern}|</?think>")
THOUGHT = "Hm."
CITIES = ("Oslo", "Rome", "Lima")


class Verdict(StrEnum):
    """The result of playing a story with a template."""

    REFUSED = "refused"
    """The checks of the start refuse the template for the story."""
    FAILED = "failed"
    """The template refuses the story, or what the policy is shown in it."""
    LOST_CALLS = "calls lost"
    EXACT = "exact"
    """The ledger is the rendering of the recorded messages, and no difference is reported."""
    REPORTED = "reported"
    """The ledger is another text, and a difference is reported."""
    SILENT = "silent"
    """The ledger is another text, and no difference is reported."""
    FALSE_ALARM = "false alarm"
    """The ledger is the rendering of the recorded messages, and a difference is reported."""


@dataclass(frozen=True)
class Story:
    """A conversation in which the policy says the assistant messages."""

    messages: Sequence[dict[str, Any]]
    thinks: bool = False
    """Whether each turn has a thought."""

    @property
    def tools(self) -> list[FakeTool]:
        results = [m for m in self.messages if m["role"] == "tool"]
        texts: dict[str, list[str]] = {}
        for result in results:
            texts.setdefault(result["name"], []).append(result["content"])
        city = {"city": {"type": "string", "description": "A city."}}
        waiting = {name: iter(given) for name, given in texts.items()}
        return [
            FakeTool(name, properties=city, reply=lambda _, name=name: next(waiting[name]))
            for name in texts
        ]

    @property
    def replies(self) -> list[str]:
        """What users say after the first turn."""
        first = next(i for i, m in enumerate(self.messages) if m["role"] == "assistant")
        return [m["content"] for m in self.messages[first:] if m["role"] == "user"]

    @property
    def num_calls(self) -> list[int]:
        return [len(m.get("tool_calls", ())) for m in self.messages]

    def needs(self, **changes: Any) -> TemplateNeeds:
        needs = TemplateNeeds(
            system=self.messages[0]["role"] == "system",
            tools=bool(self.tools),
            interaction=bool(self.replies),
            parallel_results=max(self.num_calls) > 1,
            sanity_check="ignore_strippable",
        )
        return replace(needs, **changes)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _calls(number: int, *names: str, text: str = "") -> dict[str, Any]:
    functions = [
        {"name": name, "arguments": {"city": CITIES[(number + i) % len(CITIES)]}}
        for i, name in enumerate(names)
    ]
    calls = [
        {"id": f"call{number + i:05d}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    return _says(text) | {"tool_calls": calls}


def _result(number: int, text: str, name: str = "weather") -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": name, "tool_call_id": f"call{number:05d}"}


def _round(number: int, text: str = "") -> list[dict[str, Any]]:
    return [_calls(number, "weather", text=text), _result(number, f"It rains {number} mm.")]


SYSTEM = {"role": "system", "content": "Speak like a pirate."}
ASKED, SAID = _user("How is the weather?"), _says("It rains there.")
AGAIN, LAST = _user("And in Rome?"), _says("The sun shines.")
STORIES: dict[str, Story] = {
    "chat": Story([ASKED, SAID, AGAIN, LAST]),
    "chat_system": Story([SYSTEM, ASKED, SAID, AGAIN, LAST]),
    "chat_thought": Story([ASKED, SAID, AGAIN, LAST], thinks=True),
    "tool": Story([ASKED, *_round(0), SAID]),
    "tool_system": Story([SYSTEM, ASKED, *_round(0), SAID]),
    "tool_text": Story([ASKED, *_round(0, "I look."), SAID]),
    "tool_thought": Story([ASKED, *_round(0), *_round(1), SAID], thinks=True),
    "tool_parallel": Story(
        [
            *(ASKED, _calls(0, "weather", "weather")),
            *(_result(0, "It rains."), _result(1, "The sun shines."), SAID),
        ]
    ),
    "tool_parallel2": Story(
        [
            *(ASKED, _calls(0, "weather", "clock")),
            *(_result(0, "It rains."), _result(1, "Noon.", "clock"), SAID),
        ]
    ),
    "tool_2rounds": Story([SYSTEM, ASKED, *_round(0), *_round(1), SAID]),
    "tool_user": Story([SYSTEM, ASKED, *_round(0), SAID, AGAIN, *_round(1), LAST]),
    "tool_empty": Story([ASKED, _calls(0, "weather"), _result(0, ""), SAID]),
}


@dataclass(frozen=True)
class Play:
    """What playing a story gave."""

    verdict: Verdict
    why: str = ""
    request: AsyncRolloutRequest | None = None
    ledger: str = ""
    """Text of the ledger, without the end of the last turn."""
    rendered: str = ""
    """What the template writes for the recorded messages."""
    told: str = ""
    """What the template writes for the story."""

    @property
    def kinds(self) -> list[str]:
        return sorted({d.kind for d in self.request.differences}) if self.request else []


def make_tokenizer(folder: str | Path, source: str) -> PreTrainedTokenizerBase:
    """A tokenizer with the control tokens that a template writes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = tokenizer.get_vocab()
    written = dict.fromkeys(CONTROL.findall(source))
    tokenizer.add_tokens([t for t in written if t not in known], special_tokens=True)
    return tokenizer


def play(
    template: ChatTemplate,
    report: TemplateReport,
    story: Story,
    needs: TemplateNeeds | None = None,
) -> Play:
    """Play a story, if the checks of the start accept the template for it."""
    try:
        require(report, needs or story.needs())
        parser = choose_parser(None if story.tools else "hermes", report)
    except AgentRLError as error:
        return Play(Verdict.REFUSED, str(error))
    try:
        given = _with_thoughts(template, story)
        spoken = [i for i, m in enumerate(given) if m["role"] == "assistant"]
        turns = [_write_turn(template, story, given, at) for at in spoken]
        told = _render(template, story, given, opens=False)
    except TemplateError as error:
        return Play(Verdict.FAILED, f"the template refuses the story: {error}")
    encode = template.structure.encoder.encode_rendering
    context = make_context(
        ScriptedEngine([encode(turn) for turn in turns]),
        tools=story.tools,
        interactions=[FakeUser(*story.replies)] if story.replies else [],
        template=template,
    )
    context = replace(context, parser=parser, caller=ToolCaller(parser, context.fitter.fit))
    request = make_request(
        sampling=SamplingParams(
            stop_token_ids=template.stop_token_ids, max_new_tokens=context.engine.max_model_len
        ),
        interaction_kwargs={"name": "fake"} if story.replies else {},
    )
    request.messages = [Message.model_validate(m) for m in given[: spoken[0]]]
    asyncio.run(run_request(request, context))
    return _judge(template, story, request, told)


def _judge(template: ChatTemplate, story: Story, request: AsyncRolloutRequest, told: str) -> Play:
    if request.state is RequestState.FAILED:
        return Play(Verdict.FAILED, str(request.error), request)
    ledger = template.decode([*request.prompt_ids, *request.response_ids])
    ends = [stop for stop in template.stop_texts.values() if ledger.endswith(stop)]
    ledger = ledger.removesuffix(max(ends, key=len)) if ends else ledger
    recorded = [message.to_template() for message in request.messages]
    try:
        rendered = _render(template, story, recorded, opens=False)
    except TemplateError as error:
        rendered = str(error)
    done = [c for turn in request.turns for c in turn.calls if c.outcome == "ok"]
    if len(done) != sum(story.num_calls):
        verdict = Verdict.LOST_CALLS
    elif rendered.startswith(ledger):
        verdict = Verdict.FALSE_ALARM if request.differences else Verdict.EXACT
    else:
        verdict = Verdict.REPORTED if request.differences else Verdict.SILENT
    return Play(verdict, "", request, ledger, rendered, told)


def _with_thoughts(template: ChatTemplate, story: Story) -> list[dict[str, Any]]:
    """Put a thought into each assistant message, as this template reads one."""
    given = [dict(m) for m in story.messages]
    if not story.thinks:
        return given
    for put in (_reasoning, _inline):
        tried = [put(m) if m["role"] == "assistant" else m for m in given]
        if THOUGHT in _render(template, story, tried, opens=False):
            return tried
    raise TemplateError("the template writes no thoughts")


def _reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return message | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHT)


def _inline(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": f"<think>\n{THOUGHT}\n</think>\n\n{message['content']}"}


def _write_turn(
    template: ChatTemplate, story: Story, given: Sequence[dict[str, Any]], at: int
) -> str:
    """The text of a turn: what the template writes for it after the generation prompt."""
    opened = _render(template, story, given[:at], opens=True)
    whole = _render(template, story, given[: at + 1], opens=False)
    prompt = template.structure.generation_prompt.partition("<think>")[0]
    if not whole.startswith(opened[: opened.rfind(prompt)]):
        # The template rewrites what is before the turn.
        opened, whole = opened[opened.rfind(prompt) :], whole[whole.rfind(prompt) :]
    shared = common_length(opened, whole, TAGS)
    text = whole[shared:]
    if re.search(r"<think>\s*\Z", opened[shared:]):
        # The prompt opens a thought that the template does not write in an older turn.
        text = f"{THOUGHT}\n</think>\n\n{text.removeprefix('</think>')}"
    said = given[at]["content"].split()[-1:]
    said += [call["function"]["arguments"]["city"] for call in given[at].get("tool_calls", ())]
    # An engine ends a turn at the first stop text after what the policy says.
    start = max((text.find(word) + len(word) for word in said), default=0)
    found = [(text.find(stop, start), stop) for stop in template.stop_texts.values()]
    ends = [index + len(stop) for index, stop in found if index >= 0]
    if ends:
        return text[: min(ends)]
    end = template.structure.end_of_turn.text or next(iter(template.stop_texts.values()))
    return text.rstrip("\n") + end


def _render(
    template: ChatTemplate, story: Story, messages: Sequence[Mapping[str, Any]], *, opens: bool
) -> str:
    style = template.structure.call_style
    plain: list[dict[str, Any]] = []
    for message in map(dict, messages):
        if message.get("tool_calls") and style:
            message["content"] = message.get("content") or style.empty_content
            if style.arguments_as_json:
                message["tool_calls"] = [_with_json(call) for call in message["tool_calls"]]
        plain.append(message)
    schemas = [tool.tool_schema.to_template() for tool in story.tools]
    return template.structure.renderer.render(plain, schemas, add_generation_prompt=opens)


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def main(argv: Sequence[str]) -> None:
    """Print the verdict of each story with each template, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer")
    parser.add_argument("templates", nargs="+")
    parser.add_argument("--keep", action="store_true", help="keep rewritten history")
    parser.add_argument("--loose", action="store_true", help="the start does not know the rows")
    parser.add_argument("--story", choices=STORIES)
    given = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    for path in given.templates:
        source = Path(path).read_text(encoding="utf-8")
        template = ChatTemplate(make_tokenizer(given.tokenizer, source), custom_template=path)
        report, row = probe_template(template), list[str]()
        for name, story in STORIES.items():
            if given.story not in (None, name):
                continue
            needs = story.needs(on_rewritten_history="keep" if given.keep else "error")
            if given.loose:
                needs = replace(needs, system=TemplateNeeds().system, parallel_results=False)
            found = play(template, report, story, needs)
            is_other = bool(found.ledger) and not found.told.startswith(found.ledger)
            key = found.verdict.name + ("*" if is_other else "")
            counts[key] += 1
            row.append(f"{name}={key}" + (f"[{','.join(found.kinds)}]" if found.kinds else ""))
            if given.story:
                print(found.why, *(found.request.differences if found.request else ()), sep="\n")
                print(repr(found.ledger), repr(found.rendered), repr(found.told), sep="\n")
        print(Path(path).stem, *row, flush=True)
    print(dict(counts), "(*: not the rendering of the story)")


if __name__ == "__main__":
    main(sys.argv[1:])
