"""Values that sections read in more than one form."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.schema.reward import OverlongBufferConfig, RewardConfig
from agentrl.interactions.gsm8k_interaction import Gsm8kInteraction, Gsm8kSettings
from agentrl.tools.geo3k_tool import Geo3kTool
from agentrl.tools.gsm8k_tool import Gsm8kTool, Gsm8kToolConfig

PENALTIES = [
    (RewardConfig, "length_penalty", 1),
    (OverlongBufferConfig, "penalty_factor", 1),
    (Gsm8kSettings, "hint_penalty", 1),
    (Gsm8kToolConfig, "repeat_penalty", -1),
    (Geo3kTool.keys_class, "repeat_penalty", -1),
]


@pytest.mark.parametrize(("section", "key", "sign"), PENALTIES)
@given(amount=st.floats(0, 1e6), is_negative=st.booleans())
def test_a_penalty_is_its_amount_with_either_sign(section, key, sign, amount, is_negative):
    read = getattr(section.model_validate({key: -amount if is_negative else amount}), key)
    assert read == sign * amount
    assert getattr(section.model_validate({key: read}), key) == read


@pytest.mark.parametrize(("section", "key", "sign"), PENALTIES)
def test_a_penalty_of_the_other_sign_is_noted(section, key, sign, caplog):
    with caplog.at_level(logging.WARNING):
        section.model_validate({key: sign * 0.25})
        assert not caplog.messages
        section.model_validate({key: -sign * 0.25})
    [note] = caplog.messages
    assert note.startswith(f"{key} is {-sign * 0.25:g}: a penalty lowers the reward")
    assert note.endswith(f"read as {sign * 0.25:g}")


def test_every_penalty_of_a_section_is_in_the_table():
    named = {(section, key) for section, key, _ in PENALTIES}
    for section in {section for section, _, _ in PENALTIES}:
        assert {(section, key) for key in section.model_fields if "penalty" in key} <= named


@pytest.mark.parametrize("amount", [0.1, -0.1])
def test_plug_ins_read_a_penalty_with_either_sign(amount: float):
    assert vars(Gsm8kInteraction({"hint_penalty": amount}))["_settings"].hint_penalty == 0.1
    assert vars(Gsm8kTool({"repeat_penalty": amount}))["_keys"].repeat_penalty == -0.1
