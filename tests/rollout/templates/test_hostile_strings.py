"""Hostile strings in every template that renders tools: none becomes a control token.

Each string goes once as a tool's result, as a reply of the user, or as a text of the prompt, and
the whole request is held against what it should be: no forged control token, an exact round trip.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.hostile_conversations import (
    TemplateCase,
    byte_fallback_case,
    names_with_tools,
    production_case,
)
from tests.fakes.hostile_texts import HostileTexts, hostile_texts

WITH_TOOLS = ("glm4moe", "gptoss", "llama3_2", "qwen2_5", "qwen3", "qwen3_instruct_2507")
CASES = (*WITH_TOOLS, "byte fallback")
NUM_STRINGS = 20_000
"""For each template; with the seven of them a hundred thousand and more."""
RENDERED = 20
"""One of so many conversations is also compared with the template's own rendering."""


def make_case(name: str) -> TemplateCase:
    return byte_fallback_case() if name == "byte fallback" else production_case(name)


def stream(case: TemplateCase, seed: str) -> HostileTexts:
    markers = case.template.structure.markers
    return HostileTexts(seed, list(case.control), [*markers.inside, *markers.whole])


def check_one_conversation(
    case: TemplateCase, texts: list[str], *, num_results: int, is_rendered: bool
) -> None:
    """Play one conversation and check it; if an invariant breaks, name the strings."""
    try:
        conversation = case.play(map(case.without_lost, texts), num_results)
        case.check(conversation)
        if is_rendered and num_results <= case.max_calls_rendered:
            case.check_rendering(conversation)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} with {texts!r}") from error


def check_conversations(name: str, num_strings: int) -> int:
    """Play conversations until `num_strings` different strings are used; return their number."""
    case = make_case(name)
    texts, choose, seen = stream(case, name), random.Random(name), set[str]()
    num_played = num_conversations = 0
    while len(seen) < num_strings:
        num_results = choose.choice(case.num_results)
        said = [texts.draw_new(seen) for _ in range(4 + 2 * num_results)]
        # Byte fallback writes a blank after each control token; no rendering has it.
        is_rendered = name in WITH_TOOLS and num_conversations % RENDERED == 0
        check_one_conversation(case, said, num_results=num_results, is_rendered=is_rendered)
        num_played += len(said)
        num_conversations += 1
    print(f"{name}: {len(seen)} different strings, {num_played} in {num_conversations} requests")
    return len(seen)


def test_every_template_with_tools_is_tested() -> None:
    assert tuple(names_with_tools()) == WITH_TOOLS


@pytest.mark.parametrize("name", CASES)
def test_control_tokens_probe_reports_lost_characters(name: str) -> None:
    report = make_case(name).report
    assert report.round_trip
    assert report.lost_characters == (() if name in WITH_TOOLS else ("▁",))
    row = "exact" if name in WITH_TOOLS else "exact, and these are lost: U+2581"
    assert ("text round trip", row) in report.describe()


@pytest.mark.parametrize("name", CASES)
def test_control_tokens_hostile_strings_forge_no_control_token(name: str) -> None:
    assert check_conversations(name, 300) >= 300


@pytest.mark.parametrize("name", CASES)
def test_control_tokens_generated_strings_forge_no_control_token(name: str) -> None:
    case = make_case(name)
    texts = hostile_texts(list(case.control), case.template.structure.markers.inside)

    @settings(max_examples=12, deadline=None)
    @given(said=st.lists(texts, min_size=6, max_size=6))
    def holds(said: list[str]) -> None:
        case.check(case.play(map(case.without_lost, said), 1))

    holds()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_control_tokens_twenty_thousand_hostile_strings_forge_no_control_token(
    name: str,
) -> None:
    assert check_conversations(name, NUM_STRINGS) >= NUM_STRINGS
