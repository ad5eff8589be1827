"""control tokens under fire: hostile strings through every template that carries tools.

Each string goes once as a tool's result, as a reply of the user, or as a text of the prompt, and
the whole request is held against what it should be: no forged control token, an exact round trip.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.hostile_conversations import (
    Stage,
    byte_fallback_stage,
    carrying_tools,
    production_stage,
)
from tests.fakes.hostile_texts import HostileTexts, hostile_texts

WITH_TOOLS = ("glm4moe", "gptoss", "llama3_2", "qwen2_5", "qwen3", "qwen3_instruct_2507")
STAGES = (*WITH_TOOLS, "byte fallback")
NUM_STRINGS = 100_000
RENDERED = 20
"""One conversation of so many is also held against the template's own rendering."""


def make_stage(name: str) -> Stage:
    return byte_fallback_stage() if name == "byte fallback" else production_stage(name)


def stream(stage: Stage, seed: str) -> HostileTexts:
    markers = stage.template.structure.markers
    return HostileTexts(seed, list(stage.control), [*markers.inside, *markers.whole])


def play_one(stage: Stage, texts: list[str], *, num_results: int, is_rendered: bool) -> None:
    """Play one conversation and check it; where an invariant breaks, say with which strings."""
    try:
        played = stage.play(map(stage.without_lost, texts), num_results)
        stage.check(played)
        if is_rendered and num_results <= stage.max_calls_rendered:
            stage.check_rendering(played)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} with {texts!r}") from error


def play_many(name: str, num_strings: int) -> int:
    """Play conversations until so many different strings went through; returns how many did."""
    stage = make_stage(name)
    texts, choose, seen = stream(stage, name), random.Random(name), set[str]()
    num_played = num_plays = 0
    while len(seen) < num_strings:
        num_results = choose.choice(stage.num_results)
        said = [texts.draw_new(seen) for _ in range(4 + 2 * num_results)]
        # A blank behind each control token, as the other family writes it, is in no rendering.
        is_rendered = name in WITH_TOOLS and num_plays % RENDERED == 0
        play_one(stage, said, num_results=num_results, is_rendered=is_rendered)
        num_played += len(said)
        num_plays += 1
    print(f"{name}: {len(seen)} different strings, {num_played} played in {num_plays} requests")
    return len(seen)


def test_every_template_that_carries_tools_is_under_fire() -> None:
    assert tuple(carrying_tools()) == WITH_TOOLS


@pytest.mark.parametrize("name", STAGES)
def test_control_tokens_the_probe_declares_what_does_not_come_back(name: str) -> None:
    report = make_stage(name).report
    assert report.round_trip
    assert report.lost_characters == (() if name in WITH_TOOLS else ("▁",))
    row = "exact" if name in WITH_TOOLS else "exact, and these are lost: U+2581"
    assert ("text round trip", row) in report.describe()


@pytest.mark.parametrize("name", STAGES)
def test_control_tokens_hostile_strings_forge_nothing_and_come_back(name: str) -> None:
    assert play_many(name, 300) >= 300


@pytest.mark.parametrize("name", STAGES)
def test_control_tokens_no_string_that_hypothesis_finds_forges_anything(name: str) -> None:
    stage = make_stage(name)
    texts = hostile_texts(list(stage.control), stage.template.structure.markers.inside)

    @settings(max_examples=12, deadline=None)
    @given(said=st.lists(texts, min_size=6, max_size=6))
    def holds(said: list[str]) -> None:
        stage.check(stage.play(map(stage.without_lost, said), 1))

    holds()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STAGES)
def test_control_tokens_a_hundred_thousand_hostile_strings_forge_nothing_and_come_back(
    name: str,
) -> None:
    assert play_many(name, NUM_STRINGS) >= NUM_STRINGS
