"""Tool YAML: what is right is loaded, what is wrong is named with file, key and expectation."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import AgentRLError, ConfigError, DataError, PluginError, SandboxError
from agentrl.tools import initialize_tools_from_config, load_all_tools
from agentrl.tools.calculator_tool import CalculatorTool
from agentrl.tools.gsm8k_tool import Gsm8kTool
from agentrl.tools.image_zoom_in_tool import ImageZoomInTool
from agentrl.tools.registry import classes_of_verl, select_tools
from agentrl.tools.search_tool import SearchTool
from tests.fakes.tools import FlakyTool

CONFIGS = Path(__file__).resolve().parents[2] / "configs/tool_config"

CALCULATOR = "  - class_name: agentrl.tools.calculator_tool.CalculatorTool\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    return path


def refused(path: Path, kind: type[AgentRLError] = ConfigError) -> AgentRLError:
    with pytest.raises(kind) as error:
        initialize_tools_from_config(path)
    assert str(error.value.details["file"]) == str(path)
    return error.value


NEEDS_A_SERVER = "mcp_tool"
"""Loaded where there is one: see test_mcp_everything."""


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONFIGS.glob("*.yaml")) if path.stem != NEEDS_A_SERVER],
    ids=lambda path: path.stem,
)
def test_every_config_we_ship_loads(path: Path):
    assert initialize_tools_from_config(path)


def test_a_file_written_for_verl_loads_as_ours(tmp_path: Path):
    text = (CONFIGS / "gsm8k_tool_config.yaml").read_text()
    text = text.replace("agentrl.tools.", "verl.tools.")
    [tool] = initialize_tools_from_config(written(tmp_path, text))
    assert isinstance(tool, Gsm8kTool)
    assert tool.name == "calc_gsm8k_reward"


def test_a_tool_of_verls_without_counterpart_is_refused_by_name(tmp_path: Path):
    class_path = "verl.tools.my_tool.MyTool"
    text = f"tools:\n  - class_name: {class_path}\n    config: {{type: native}}\n"
    error = refused(written(tmp_path, text), PluginError)
    assert f"{class_path} is a path into verl" in str(error)
    assert error.details["key"] == "tools[0].class_name"
    assert "agentrl.tools.BaseTool" in str(error.details["expected"])


def test_an_mcp_tool_of_verls_is_ours_and_asks_for_its_servers(tmp_path: Path):
    text = (
        "tools:\n  - class_name: verl.tools.mcp_search_tool.MCPSearchTool\n"
        "    config: {rate_limit: 120, timeout: 120, type: mcp}\n"
        "    mcp: {mcp_servers_config_path: ./mcp_server.json, tool_selected_list: [search]}\n"
    )
    error = refused(written(tmp_path, text))
    assert "no file mcp_server.json" in str(error)
    assert error.details["key"] == "tools[0].mcp.mcp_servers_config_path"


def test_replaced_classes_of_verl_are_listed(tmp_path: Path):
    names = ["verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.search_tool.SearchTool"]
    text = "tools:\n" + "".join(f"  - class_name: {name}\n" for name in names)
    assert classes_of_verl(written(tmp_path, text)) == [
        f"{name} -> agentrl.compat.{name}" for name in names
    ]


def test_keys_are_renamed_for_subclasses_too(tmp_path: Path):
    name = "tests.tools.test_registry.MySearch"
    config = "{retrieval_service_url: 'http://here', topk: 7, timeout: 3}"
    [tool] = initialize_tools_from_config(
        written(tmp_path, f"tools: [{{class_name: {name}, config: {config}}}]\n")
    )
    assert tool.config == {"url": "http://here", "top_k": 7, "timeout_s": 3}


class MySearch(SearchTool):
    pass


@pytest.mark.parametrize(
    ("config", "key", "what"),
    [
        ("{url: 'http://x', top_k: 0}", "config.top_k", "top_k is 0"),
        ("{url: 'http://x', tok: 3}", "config.tok", "did you mean 'top_k'"),
        ("{}", "config", "needs url"),
        (
            "{topk: 2}",
            "config",
            "a key is missing: retriever http needs url (or retrieval_service_",
        ),
        ("{url: 'http://x', topk: 3, top_k: 3}", "config.topk", "two names of one key"),
    ],
)
def test_what_a_bundled_tool_refuses_is_named_with_file_and_key(
    tmp_path: Path, config: str, key: str, what: str
):
    name = "agentrl.tools.search_tool.SearchTool"
    text = f"tools: [{{class_name: {name}, config: {config}}}]\n"
    error = refused(written(tmp_path, text))
    assert what in str(error)
    assert error.details["key"] == f"tools[0].{key}"


class Refusing(FlakyTool):
    """Refuses to be built, with an error of our tree or of Python's."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__()
        if config["with"] == "ours":
            raise SandboxError("gone", provider="p", key="config.sandbox.url", expected="a url")
        raise OSError("no luck")


def test_what_a_class_refuses_keeps_its_own_words_and_kind(tmp_path: Path):
    name = "tests.tools.test_registry.Refusing"
    path = written(tmp_path, f"tools: [{{class_name: {name}, config: {{with: ours}}}}]\n")
    error = refused(path, SandboxError)
    assert str(error).splitlines()[0] == "gone"
    assert error.details["key"] == "tools[0].config.sandbox.url"
    assert str(error).count("expected:") == 1
    path = written(tmp_path, f"tools: [{{class_name: {name}, config: {{with: theirs}}}}]\n")
    assert "raised OSError: no luck" in str(refused(path))


def test_a_sandbox_that_is_refused_is_named_with_its_key(tmp_path: Path):
    name = "agentrl.tools.python_tool.PythonTool"
    sandbox = "{provider: sandbox_fusion}"
    text = f"tools: [{{class_name: {name}, config: {{sandbox: {sandbox}}}}}]\n"
    error = refused(written(tmp_path, text))
    assert str(error.details["key"]).startswith("tools[0].config.sandbox")
    assert str(error).count("expected:") == 1
    assert "raised" not in str(error)
    text = text.replace(sandbox, "{provider: subprocess}")
    error = refused(written(tmp_path, text), SandboxError)
    assert error.details["key"] == "tools[0].config.sandbox"


class Own(FlakyTool):
    """Reads whatever keys it likes."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__()
        self.config = config


@pytest.mark.parametrize(
    ("config", "warned_keys"),
    [
        (
            "{timeout: 5, retries: 3, rate_limits: 2}",
            [("timeout", "timeout_s"), ("retries", "retry"), ("rate_limits", "rate_limit")],
        ),
        ("{timeout_s: 5, retry: {max_attempts: 3}, type: native}", []),
        ("{cache_dir: x, url: 'http://x', model: m, top_k: 3, headers: {}, seed: 1}", []),
    ],
)
def test_a_misspelled_agentrl_key_of_a_users_tool_is_reported(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: str,
    warned_keys: list[tuple[str, str]],
):
    name = "tests.tools.test_registry.Own"
    path = written(tmp_path, f"tools: [{{class_name: {name}, config: {config}}}]\n")
    [tool] = initialize_tools_from_config(path)
    assert set(tool.config) >= {key for key, _ in warned_keys}
    assert caplog.messages == [
        f"{path}: tools[0].config.{key} is not read by agentrl; did you mean {near}?"
        for key, near in warned_keys
    ]


def test_keys_that_are_translated_are_no_near_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = "{retrieval_service_url: 'http://here', timeout: 3}"
    for name in ("tests.tools.test_registry.MySearch", "verl.tools.search_tool.SearchTool"):
        text = f"tools: [{{class_name: {name}, config: {config}}}]\n"
        initialize_tools_from_config(written(tmp_path, text))
    assert caplog.messages == []


def test_error_of_a_subclass_of_verls_base_names_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "their_tools.py").write_text(
        "from verl.tools.base_tool import BaseTool\nclass Mine(BaseTool): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = written(tmp_path, "tools: [{class_name: their_tools.Mine, config: {type: native}}]\n")
    error = refused(path, PluginError)
    assert "set AGENTRL_VERL=1 in the environment" in str(error)


def test_verls_tool_for_images_is_ours(tmp_path: Path):
    class_path = "verl.tools.image_zoom_in_tool.ImageZoomInTool"
    config = "{num_workers: 256, rate_limit: 256, timeout: 60, type: native}"
    text = f"tools:\n  - class_name: {class_path}\n    config: {config}\n"
    [tool] = initialize_tools_from_config(written(tmp_path, text))
    assert isinstance(tool, ImageZoomInTool)


def test_schema_and_config_may_be_left_out(tmp_path: Path):
    path = written(tmp_path, f"tools:\n{CALCULATOR}    tool_schema: null\n")
    [tool] = initialize_tools_from_config(path)
    assert isinstance(tool, CalculatorTool)
    assert tool.config == {}


def test_the_config_reaches_the_class_whole_and_interpolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SEARCH_URL", "http://here")
    config = "    config: {type: native, url: '${oc.env:SEARCH_URL}', k: 1e-3}\n"
    blocking = "  - class_name: tests.fakes.tools.BlockingTool\n"
    [tool] = initialize_tools_from_config(written(tmp_path, f"tools:\n{blocking}{config}"))
    assert tool.config == {"type": "native", "url": "http://here", "k": 1e-3}


def test_a_schema_goes_through_whole(tmp_path: Path):
    schema = (
        "    tool_schema: {type: function, x-ours: 1, function: {name: f, strict: true, "
        "parameters: {type: object, $defs: {n: {type: integer}}, properties: {a: {anyOf: "
        "[{$ref: '#/$defs/n'}, {type: array, items: {type: string}}], default: [x]}}, "
        "additionalProperties: false}}}\n"
    )
    [tool] = initialize_tools_from_config(written(tmp_path, f"tools:\n{CALCULATOR}{schema}"))
    assert tool.tool_schema.to_template() == {
        "type": "function",
        "x-ours": 1,
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {
                "type": "object",
                "$defs": {"n": {"type": "integer"}},
                "properties": {
                    "a": {
                        "anyOf": [
                            {"$ref": "#/$defs/n"},
                            {"type": "array", "items": {"type": "string"}},
                        ],
                        "default": ["x"],
                    }
                },
                "additionalProperties": False,
            },
        },
    }


def test_a_missing_file_is_named(tmp_path: Path):
    (tmp_path / "tools.yaml").touch()
    message = str(refused(tmp_path / "toolz.yaml"))
    assert f"no file {tmp_path}/toolz.yaml; did you mean 'tools.yaml'?" in message
    assert "expected: a YAML file" in message


def test_malformed_yaml_names_line_and_column(tmp_path: Path):
    error = refused(written(tmp_path, "tools:\n  - class_name: a\n   config: [\n"))
    assert "malformed YAML in line 3, column" in str(error)


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ("", None, "no key 'tools'"),
        ("- a\n", None, "no key 'tools'"),
        ("tools: 3\n", "tools", "tools is 3"),
        ("tools: []\ntool: []\n", "tool", "did you mean 'tools'"),
        ("tools: [3]\n", "tools[0]", "a mapping with class_name"),
        ("tools: [{config: {}}]\n", "tools[0].class_name", "class_name is missing"),
        (
            f"tools: [{{config: {{text: {'long ' * 40}}}, mcp: null}}]\n",
            "tools[0].class_name",
            "(found a mapping with config, mcp)",
        ),
        (
            f"tools:\n{CALCULATOR}    config: {'long_' * 40}end\n",
            "tools[0].config",
            "long_end'",
        ),
        (f"tools:\n{CALCULATOR}    confg: {{}}\n", "tools[0].confg", "did you mean 'config'"),
        (f"tools:\n{CALCULATOR}    config: 3\n", "tools[0].config", "a mapping"),
        (f"tools:\n{CALCULATOR}    config: {{type: mcp}}\n", "tools[0].mcp", "names no servers"),
        (f"tools:\n{CALCULATOR}    config: {{type: x}}\n", "tools[0].config.type", "'x'"),
        (f"tools:\n{CALCULATOR}    mcp: {{a: 1}}\n", "tools[0].mcp", "no tool of MCP servers"),
        (
            f"tools:\n{CALCULATOR}    config: {{isolation: jail}}\n",
            "tools[0].config.isolation",
            "'jail'",
        ),
        (
            f"tools:\n{CALCULATOR}    tool_schema: {{function: {{name: ''}}}}\n",
            "tools[0].tool_schema.function.name",
            "at least 1",
        ),
        (
            f"tools:\n{CALCULATOR}    tool_schema: {{function: {{name: f, parameters: "
            "{type: nonsense}}}\n",
            "tools[0].tool_schema.function.parameters",
            "not a JSON Schema",
        ),
        (f"tools:\n{CALCULATOR}{CALCULATOR}", "tools[1]", "two tools have the name 'calculator'"),
        (
            "tools: [{class_name: tests.fakes.tools.BlockingTool, config: {a: '${b}'}}]\n",
            "tools[0].config.a",
            "Interpolation key 'b' not found",
        ),
        (
            "tools: [{class_name: a.B, config: {urls: ['${oc.env:NO_SUCH}/x']}}]\n",
            "tools[0].config.urls[0]",
            "the environment variable NO_SUCH is not set",
        ),
        ("tools: [{class_name: agentrl.tools.BaseTool}]\n", "tools[0]", "has no schema"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(tmp_path: Path, text: str, key: str | None, what: str):
    error = refused(written(tmp_path, text))
    assert what in str(error)
    assert error.details.get("key") == key
    assert key is None or error.details["expected"]


@pytest.mark.parametrize(
    ("class_path", "what"),
    [
        ("nowhere.Tool", "ModuleNotFoundError"),
        ("agentrl.tools.Nothing", "has no 'Nothing'"),
        ("Tool", "no path to a Python object"),
        ("pathlib.Path", "not a BaseTool"),
        ("agentrl.tools.function_tool.function_tool", "not a BaseTool"),
    ],
)
def test_a_class_path_that_is_no_tool_is_refused_before_anything_is_built(
    tmp_path: Path, class_path: str, what: str
):
    bomb = "tests.tools.test_registry.Bomb"
    text = f"tools:\n  - class_name: {bomb}\n  - class_name: {class_path}\n"
    error = refused(written(tmp_path, text), PluginError)
    assert what in str(error)
    assert error.details["key"] == "tools[1].class_name"


def test_a_wrong_class_name_leads_to_the_nearest_tool_and_to_tools_alone(tmp_path: Path):
    text = "tools: [{class_name: agentrl.tools.calculator_tool.CalculatorTol}]\n"
    error = refused(written(tmp_path, text), PluginError)
    assert "has no 'CalculatorTol'; did you mean 'CalculatorTool'?" in str(error)
    assert error.details["expected"] == "one of CalculatorTool"


@pytest.mark.parametrize(
    ("name", "module"),
    [("PythonTool", "python_tool"), ("HTTPTool", "http_tool"), ("MCPTool", "mcp_tool")],
)
def test_a_class_without_its_module_leads_to_the_module_of_its_name(
    tmp_path: Path, name: str, module: str
):
    text = f"tools: [{{class_name: agentrl.tools.{name}}}]\n"
    error = refused(written(tmp_path, text), PluginError)
    assert f"has no {name!r}; did you mean 'agentrl.tools.{module}.{name}'?" in str(error)


def test_a_guess_at_a_module_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "guessed").mkdir()
    (tmp_path / "guessed/__init__.py").touch()
    (tmp_path / "guessed/my_tool.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    error = refused(written(tmp_path, "tools: [{class_name: guessed.MyTool}]\n"), PluginError)
    assert "did you mean 'guessed.my_tool.MyTool'?" in str(error)
    assert "guessed.my_tool" not in sys.modules


class Bomb(FlakyTool):
    def __init__(self, *_: object) -> None:
        raise AssertionError("built before every class was checked")


def test_names_of_yaml_and_function_tools_may_not_collide(tmp_path: Path):
    source = tmp_path / "functions.py"
    source.write_text(
        "from agentrl.tools import function_tool\n"
        "@function_tool\ndef calculator(expression: str) -> str: return ''\n"
    )
    with pytest.raises(ConfigError, match="two tools have the name 'calculator'"):
        load_all_tools(CONFIGS / "calculator_tool_config.yaml", source)
    assert len(load_all_tools(None, source)) == 1
    assert load_all_tools() == []


def test_a_row_has_every_tool_unless_it_selects():
    tools = [FlakyTool("a"), FlakyTool("b"), FlakyTool("c")]
    names = [tool.name for tool in select_tools(tools, tools_kwargs={"a": {}})]
    assert names == ["a", "b", "c"]
    assert [t.name for t in select_tools(tools, tool_selection=["c", "a"])] == ["c", "a"]
    assert select_tools(tools, tool_selection=[]) == []


def test_a_tool_that_only_the_data_knows_is_named():
    with pytest.raises(DataError, match="tool_selection names the tool 'x'"):
        select_tools([FlakyTool("a")], tool_selection=["x"])
    with pytest.raises(DataError, match="tools_kwargs names the tool 'x'"):
        select_tools([FlakyTool("a")], tools_kwargs={"x": {}, "a": {}})
    assert select_tools([FlakyTool("a")], tools_kwargs={"x": None})


def test_the_doors_load_nothing_heavy():
    code = (
        "import sys, agentrl.tools, agentrl.interactions; "
        "print([m for m in ('torch', 'transformers', 'ray', 'sglang', 'multiprocessing.forkserver',"
        " 'mcp', 'aiohttp', 'httpx', 'bm25s') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_row_may_have_the_tools_of_its_tools_kwargs_alone():
    tools = [FlakyTool("a"), FlakyTool("b")]

    def names(**row):
        return [tool.name for tool in select_tools(tools, per_row="tools_kwargs", **row)]

    assert names(tools_kwargs={"b": {}}) == ["b"]
    assert names(tools_kwargs={"b": {}, "a": {}}) == ["b", "a"]
    assert names(tools_kwargs={"b": {}, "a": None}) == ["b"]
    assert names(tools_kwargs={}) == names() == []
    assert names(tools_kwargs={"b": {}}, tool_selection=["a"]) == ["a"]
    with pytest.raises(DataError, match="tools_kwargs names the tool 'x'"):
        names(tools_kwargs={"x": {}})


def test_a_run_without_tools_ignores_the_tools_of_a_row():
    assert select_tools([], tools_kwargs={"a": {}}, per_row="tools_kwargs") == []


@pytest.mark.parametrize("value", ["[" * 2000, "9" * 5000])
def test_yaml_that_python_cannot_read_is_named(tmp_path: Path, value: str):
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools: {value}")
    with pytest.raises(ConfigError):
        initialize_tools_from_config(file)


def test_seven_hundred_tools_are_no_attack(tmp_path: Path):
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schemas = (
        {"name": f"tool{index}", "description": "It adds.", "parameters": parameters}
        for index in range(700)
    )
    entries = [
        {"class_name": "x.Y", "tool_schema": {"type": "function", "function": function}}
        for function in schemas
    ]
    file = tmp_path / "tools.yaml"
    file.write_text(json.dumps({"tools": entries}))
    with pytest.raises(PluginError, match="importing x raised"):  # so the file was read
        initialize_tools_from_config(file)
