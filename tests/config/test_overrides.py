"""Overrides of the command line, with Hydra's marks."""

import pytest
from omegaconf import OmegaConf

from agentrl.config.overrides import apply_overrides, key_of
from agentrl.errors import ConfigError


def overridden(*overrides: str):
    base = OmegaConf.create({"a": {"b": 1, "c": [1]}, "d": "${a.b}"})
    return OmegaConf.to_container(apply_overrides(base, overrides), resolve=True)


@pytest.mark.parametrize("mark", ["", "+", "++"])
def test_a_key_is_set_or_added(mark: str):
    assert overridden(f"{mark}a.b=2", f"{mark}a.new=[x, y]") == {
        "a": {"b": 2, "c": [1], "new": ["x", "y"]},
        "d": 2,
    }


@pytest.mark.parametrize("override", ["~a.c", "~a.c=1"])
def test_a_key_is_taken_away(override: str):
    assert overridden(override) == {"a": {"b": 1}, "d": 1}


def test_taking_away_what_is_not_there_changes_nothing():
    assert overridden("~x.y") == overridden("~a.z") == overridden()


def test_the_last_one_wins():
    assert overridden("a.b=2", "a.b=3")["d"] == 3


@pytest.mark.parametrize("override", ["hydra/launcher=slurm", "model@actor_rollout_ref.model=x"])
def test_files_of_hydras_are_not_chosen(override: str):
    with pytest.raises(ConfigError, match="composes no files"):
        overridden(override)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("{attention:eager,n:1}", {"attention": "eager", "n": 1}),
        ("{attention: eager, n: 1}", {"attention": "eager", "n": 1}),
        ("{x:{y:1},z:[{w:2},u:v]}", {"x": {"y": 1}, "z": [{"w": 2}, "u:v"]}),
        ("{x:'y:1,z:2',w:it's}", {"x": "y:1,z:2", "w": "it's"}),
        ("{url:http://x}", {"url": "http://x"}),
        ("[x:1,y:2]", ["x:1", "y:2"]),
        ("'{x:1}'", "{x:1}"),
    ],
)
def test_a_mapping_needs_no_blanks_after_its_colons(value: str, read: object):
    assert overridden(f"a.b={value}")["a"]["b"] == read


def test_a_mapping_is_merged_and_all_else_takes_the_place_of_what_was_there():
    assert overridden("a={new:2}")["a"] == {"b": 1, "c": [1], "new": 2}
    assert overridden("a.c=[2]", "~d", "d={x: 1}") == {"a": {"b": 1, "c": [2]}, "d": {"x": 1}}
    assert overridden("~a", "a={b: 5}")["a"] == {"b": 5}


@pytest.mark.parametrize("mark", ["", "+", "++"])
def test_an_empty_mapping_empties_what_was_there(mark: str):
    assert overridden(f"{mark}a.c={{}}", "d=1")["a"] == {"b": 1, "c": {}}
    assert overridden(f"{mark}a={{}}", "d=1") == {"a": {}, "d": 1}
    assert overridden(f"{mark}a={{}}", "a.new=2", "d=1") == {"a": {"new": 2}, "d": 1}


def test_a_list_and_a_mapping_replace_each_other():
    assert overridden("a=[1]", "d=1") == {"a": [1], "d": 1}
    assert overridden("a.c={x: 1}")["a"] == {"b": 1, "c": {"x": 1}}


@pytest.mark.parametrize("key", ["a.c.x", "a.c.0"])
def test_a_part_of_a_list_is_not_set(key: str):
    with pytest.raises(ConfigError, match="a part of a list"):
        overridden(f"{key}=1")


@pytest.mark.parametrize("override", ["a.b", "=1", "~", "+=1"])
def test_what_is_no_override_is_refused(override: str):
    with pytest.raises(ConfigError, match="no override"):
        overridden(override)


def test_the_key_is_the_text_before_the_first_equals_sign():
    assert [key_of(o) for o in ("+a.b=c=d", "~a", "++x=1")] == ["a.b", "a", "x"]
