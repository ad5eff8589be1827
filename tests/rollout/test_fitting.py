"""What outside says, within its budget of tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.fitting import TextFitter
from tests.fakes.conversations import HOSTILE
from tests.fakes.plugins import tiny_template
from tests.fakes.templates import load_template

SIDES = st.sampled_from(["left", "middle", "right"])


def fitter(max_tokens: int, side: Any = "middle", template: Any = None) -> TextFitter:
    return TextFitter(template or tiny_template(), max_tokens=max_tokens, side=side)


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "abcdefg ... "), ("right", " ... tuvwxyz"), ("middle", "abcd ... xyz")],
)
def test_sides_are_named_as_verl_names_them(side: str, text: str):
    fitted = fitter(12, side).fit("abcdefghijklmnopqrstuvwxyz")
    assert fitted == (text, 19)


def test_a_budget_too_small_for_the_marker_has_none():
    assert fitter(4).fit("abcdefgh") == ("abgh", 4)


def test_a_torn_character_does_not_exceed_the_budget():
    fitted = fitter(9, "left").fit("😀" * 10)
    assert len(tiny_template().encode_text(fitted.text)) <= 9
    assert fitted.num_cut >= 40 - 9


@given(HOSTILE, st.integers(1, 30), SIDES)
def test_budgets_an_observation_keeps_to_its_budget(text: str, max_tokens: int, side: Any):
    template = tiny_template()
    fitted = fitter(max_tokens, side).fit(text)
    whole = text.encode("utf-8", "replace").decode()
    assert len(template.encode_text(fitted.text)) <= max_tokens
    assert (fitted.num_cut > 0) == (len(template.encode_text(whole)) > max_tokens)
    assert fitted.num_cut or fitted.text == whole


@given(st.text(max_size=200) | HOSTILE, st.integers(1, 30), SIDES)
def test_budgets_holds_where_tokens_are_longer_than_bytes(text: str, max_tokens: int, side: Any):
    template = load_template("qwen2_5")
    fitted = fitter(max_tokens, side, template).fit(text)
    whole = text.encode("utf-8", "replace").decode()
    assert len(template.encode_text(fitted.text)) <= max_tokens
    assert (fitted.num_cut > 0) == (len(template.encode_text(whole)) > max_tokens)


@pytest.mark.parametrize("text", ["x" * 2**20, "word " * 2**18, " " * 2**20, "\n" * 2**20])
@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_a_megabyte_is_clipped_before_it_is_encoded(text: str, side: str):
    template = load_template("qwen2_5")
    encoded: list[int] = []

    class Measuring:
        def __getattr__(self, name: str) -> Any:
            return getattr(template, name)

        def encode_text(self, text: str) -> list[int]:
            encoded.append(len(text))
            return template.encode_text(text)

    fitted = fitter(100, side, Measuring()).fit(text)
    assert max(encoded) <= 100 * 64
    assert len(template.encode_text(fitted.text)) <= 100
    assert " ..." in fitted.text
    whole = len(template.encode_text(text[: 2**14])) * 2**6
    assert whole * 0.8 < fitted.num_cut < whole * 1.5


def test_what_is_far_too_long_is_clipped_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch):
    text = "word " * 10**6
    encoded: list[int] = []
    short = fitter(16)
    template = vars(short)["_template"]
    encode = template.encode_text
    monkeypatch.setattr(template, "encode_text", lambda t: encoded.append(len(t)) or encode(t))
    assert "..." in short.fit(text).text
    assert encoded
    assert sum(encoded) < 100_000


def test_text_that_is_no_unicode_is_replaced_within_the_budget():
    assert fitter(16).fit("a\ud800b") == ("a?b", 0)
