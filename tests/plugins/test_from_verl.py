"""Keys of entries that were written for verl: read, or noted."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from agentrl.compat.interactions import Gsm8kInteraction
from agentrl.interactions import initialize_interactions_from_config
from agentrl.tools import initialize_tools_from_config

GSM8K = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
WEATHER = "verl.interactions.weather_interaction.WeatherInteraction"
HINTS = ["max_hints", "hint_penalty"]
ZOOM = "verl.tools.image_zoom_in_tool.ImageZoomInTool"
SEARCH = {"retrieval_service_url": "http://127.0.0.1:1"}


class Mine(Gsm8kInteraction):
    """Reads keys of its own."""


def notes(folder: Path, kind: str, entry: dict[str, Any], caplog: Any) -> list[str]:
    (path := folder / "plugins.yaml").write_text(json.dumps({kind: [entry]}))
    load: Any = initialize_tools_from_config
    if kind == "interaction":
        load = initialize_interactions_from_config
    with caplog.at_level(logging.WARNING):
        load(path)
    return [line.partition("has no effect under verl's class path")[0] for line in caplog.messages]


@pytest.mark.parametrize(
    ("kind", "class_name", "config", "noted"),
    [
        ("interaction", GSM8K, dict.fromkeys(HINTS, 1), HINTS),
        ("interaction", GSM8K, {"timeout_s": 3, "name": "x"}, []),
        ("interaction", WEATHER, {"a": 1}, ["a"]),
        ("interaction", "verl.interactions.base.BaseInteraction", {"score": 1}, ["score"]),
        ("interaction", "agentrl.interactions.gsm8k_interaction.Gsm8kInteraction",
         {"max_hints": 2}, []),
        ("interaction", f"{__file__}:Mine", {"max_hints": 2}, []),
        ("tools", ZOOM, {"num_workers": 2, "rate_limit": 3}, ["num_workers", "rate_limit"]),
        ("tools", "verl.tools.search_tool.SearchTool",
         {**SEARCH, "rate_limit": 9, "topk": 3, "num_workers": 4}, ["rate_limit"]),
        ("tools", "agentrl.tools.search_tool.SearchTool", {"url": "http://127.0.0.1:1"}, []),
    ],
)  # fmt: skip
def test_a_key_without_effect_under_verls_class_path_is_noted(
    tmp_path: Path,
    caplog: Any,
    kind: str,
    class_name: str,
    config: dict[str, Any],
    noted: list[str],
):
    entry = {"class_name": class_name, "config": config}
    found = notes(tmp_path, kind, entry, caplog)
    place = "interaction[0]" if kind == "interaction" else "tools[0]"
    assert found == [f"{tmp_path / 'plugins.yaml'}: {place}.config.{name} " for name in noted]
