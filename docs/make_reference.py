"""Write docs/reference/ from the code: `python docs/make_reference.py`.

The pages of the API name what each package exports; mkdocstrings adds signatures and docstrings
when the site is built.
"""

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import agentrl
from agentrl import errors
from agentrl.cli import app
from agentrl.config.tables import load_table
from agentrl.rollout import states

FOLDER = Path(__file__).resolve().parent / "reference"
PACKAGE = Path(agentrl.__file__).parent
NOTE = "This page is written by `docs/make_reference.py` from the code."
MODULES = (
    "agentrl", "agentrl.tools", "agentrl.interactions", "agentrl.agent_loops", "agentrl.rollout",
    "agentrl.engines", "agentrl.rewards", "agentrl.algorithms", "agentrl.cluster", "agentrl.config",
    "agentrl.data", "agentrl.plugins", "agentrl.protocol", "agentrl.sandbox",
)  # fmt: skip
WHAT_TO_DO = {
    "AgentRLError": "Catch it to catch every error of agentrl.",
    "ConfigError": "Change the key that the message names. `agentrl config check` finds these "
    "without a run.",
    "DataError": "Repair or remove the row that the message names.",
    "PluginError": "Check the path: `package.module.Name`, or `path/to/file.py:Name`.",
    "MissingExtraError": "Run the `pip install` line of the message.",
    "TemplateError": "See [chat templates](../chat_templates.md); choose another template or "
    "another format of tool calls.",
    "LedgerError": "Report it with the message: tokens would not agree with their record. The "
    "request is not trained.",
    "TransitionError": "In a plug-in that drives requests: take an edge of the "
    "[table](../requests.md). Else report it.",
    "CheckpointError": "Resume from an earlier checkpoint, or give the run another folder.",
    "StoreError": "Check the URL, the credentials and the package of its protocol "
    "([runs](../runs.md)).",
    "TrainingError": "Read the key and the expected value in the message.",
    "OutOfMemoryError": "Change the keys that the message names ([memory](../memory.md)).",
    "AgentError": "See the agent's output in the saved rollout.",
    "EngineError": "See the engine's log in the run folder ([SGLang](../sglang.md)).",
    "InteractionError": "See the traceback in the saved rollout "
    "([interactions](../interactions.md)).",
    "RewardError": "Return a finite number, or a mapping with `score` ([rewards](../rewards.md)).",
    "SandboxError": "Install what the message names, or choose another provider "
    "([trust](../trust.md)).",
    "ServiceError": "Start the service, or correct its address.",
    "ToolLifeError": "See the traceback in the saved rollout ([tools](../tools.md)).",
    "ToolCallError": "Repair the tool, or let the model read the failure "
    "(`rollout.multi_turn.on_tool_failure`).",
    "RankError": "Read the message of the rank that failed first.",
    "ClusterError": "Read the last lines of the process in the message ([cluster](../cluster.md)).",
    "WorkerLostError": "Nothing, if the run continues: the work is repeated. Else see the log of "
    "the process.",
    "WorkerLateError": "Give the process more time or less work.",
    "RolloutError": "Read the reasons in the message; `rollout.failure` has the limits.",
    "ToolError": "Raise it in a tool to answer the model with a text; it is not a failure.",
}
"""What a user does about each error of `agentrl.errors`."""


def cell(text: str) -> str:
    """Return text that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(titles: str, rows: list[list[str]]) -> str:
    """Return a table; `titles` are separated by commas."""
    names = [name.strip() for name in titles.split(",")]
    lines = [names, ["---"] * len(names), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def link_pages(text: str) -> str:
    """Return text in which the names of pages are links."""
    return re.sub(r"docs/(?:reference/)?(\w+\.md)", link_page, text)


def link_page(found: re.Match[str]) -> str:
    """Return the link to a page, from a page of the reference."""
    return f"[{found[1]}]({'' if '/reference/' in found[0] else '../'}{found[1]})"


def first_paragraph(thing: object) -> str:
    """Return the first paragraph of a docstring."""
    return (inspect.getdoc(thing) or "").split("\n\n")[0]


# The API.


def canonical(found: object) -> str | None:
    """Return where a class or function is defined; None for any other object."""
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return None
    return f"{found.__module__}.{found.__qualname__}"


def api_page(name: str, done: set[str]) -> str:
    """Return the page of one module; what is in `done` is documented by an earlier page."""
    module = importlib.import_module(name)
    rows, directives = list[list[str]](), list[str]()
    for export in sorted(module.__all__):
        found = getattr(module, export)
        path = canonical(found)
        if path is None or not path.startswith("agentrl."):
            continue
        rows.append([f"`{export}`", first_paragraph(found)])
        if path not in done:
            directives.append(f"::: {path}")
        done.add(path)
    head = f"# {name}\n\n{first_paragraph(module)}\n\n{NOTE}"
    parts = [head, table("name, purpose", rows), *directives]
    return "\n\n".join(parts) + "\n"


def api_pages() -> dict[str, str]:
    """Return the pages of all modules."""
    done = set[str]()
    return {f"api/{name.rpartition('.')[2]}.md": api_page(name, done) for name in MODULES}


# Metrics.


def metrics_page() -> str:
    """Return the page of metrics."""
    head = (
        f"# Metrics\n\nEvery metric of `metrics.jsonl` and of the trackers. {NOTE}\n\n"
        "`{mean,max,min}` stands for one metric each, `<tool>` and the like for a name of the run."
        "\nA metric is of one step, over all ranks; it is absent if there is nothing to measure.\n"
        "[Runs](../runs.md#the-console) has the columns of the console."
    )
    parts = [head]
    for section, metrics in load_table(PACKAGE / "trainer/metrics/meanings.yaml").items():
        rows = [
            [f"`{name}`", unit, link_pages(meaning)] for name, (unit, meaning) in metrics.items()
        ]
        parts.append(f"## {section}\n\n{table('metric, unit, meaning', rows)}")
    return "\n\n".join(parts) + "\n"


# Errors.


def member_docs(source: object, name: str) -> dict[str, str]:
    """Return the string under each member of the class `name` of a module."""
    tree = ast.parse(inspect.getsource(source))  # pyright: ignore[reportArgumentType]
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    found = dict[str, str]()
    for member, text in itertools.pairwise(body):
        match member, text:
            case ast.Assign(targets=[ast.Name(id=key)]), ast.Expr(value=ast.Constant(value=str(v))):
                found[key] = v
    return found


def error_rows() -> Iterator[list[str]]:
    """Yield name, standard base, meaning and advice of each public error."""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if not issubclass(kind, errors.AgentRLError):
            continue
        standard = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
        yield [f"`{name}`", f"`{standard}`", inspect.getdoc(kind) or "", WHAT_TO_DO[name]]


def errors_page() -> str:
    """Return the page of errors, faults and stop reasons."""
    reasons, faults = member_docs(states, "StopReason"), member_docs(errors, "Fault")
    ends = [
        [
            f"`{reason}`", reasons[reason.name], f"{end.state}", str(end.fault or ""),
            "yes" if end.in_baseline else "no", "yes" if end.trained else "no",
        ]
        for reason, end in states.ENDS.items()
    ]  # fmt: skip
    rows = [[cell(text.split("\n\nArgs:")[0]) for text in row] for row in error_rows()]
    return (
        "\n\n".join(
            [
                f"# Errors and ends\n\n{NOTE}",
                "## Errors\n\nEach error is in `agentrl.errors`, inherits a standard error, and "
                "names what is wrong, where, and what was expected. The details are attributes.",
                table("error, also a, meaning, what to do", rows),
                "## Faults\n\nA failed request has an error with one of these faults: "
                "`rollout/failures/<fault>` counts them.",
                table("fault, whose", [[f"`{f}`", faults[f.name]] for f in errors.Fault]),
                "## Stop reasons\n\nEvery finished request has one: `rollout/stop_reason/<reason>` "
                "counts them. [Requests](../requests.md) has the states.",
                table("reason, meaning, state, fault, in baseline, trained", ends),
            ]
        )
        + "\n"
    )


# The command line.


def plain(text: str | None) -> str:
    """Return help text without the backslashes that rich needs, and with links to pages."""
    without = re.sub(r"\\(?=\[)", "", text or "")
    return link_pages(without)


def describe_parameter(parameter: Any) -> list[str]:
    """Return name, default and meaning of an argument or option."""
    is_argument = parameter.param_type_name == "argument"
    name = parameter.metavar if is_argument else ", ".join(parameter.opts)
    if not is_argument and not parameter.is_flag:
        name += " VALUE"
    has_default = parameter.default is not None and parameter.default is not False
    default = f"`{parameter.default}`" if has_default else ""
    default = "**required**" if parameter.required else default
    return [f"`{name}`", default, plain(parameter.help)]


def commands(command: Any, path: str) -> Iterator[str]:
    """Yield the section of each command of a group."""
    for name, inner in command.commands.items():
        whole = f"{path} {name}"
        if hasattr(inner, "commands"):
            yield from commands(inner, whole)
            continue
        arguments = [p for p in inner.params if p.param_type_name == "argument"]
        given = [p.metavar + ("..." if p.nargs != 1 else "") for p in arguments]
        parameters = [describe_parameter(p) for p in inner.params if not p.hidden]
        usage = " ".join([whole, "[OPTIONS]", *given])
        text = f"## {whole}\n\n{plain(inner.help).strip()}\n\n```text\n{usage}\n```"
        yield f"{text}\n\n{table('argument or option, default, meaning', parameters)}"


def command_line_page() -> str:
    """Return the page of the command line."""
    root = typer.main.get_command(app)
    head = f"# Command line\n\n{NOTE} `agentrl COMMAND --help` prints the same."
    return "\n\n".join([head, *commands(root, "agentrl")]) + "\n"


def pages() -> dict[str, str]:
    """Return every page by its path in docs/reference/."""
    return {
        **api_pages(),
        "metrics.md": metrics_page(),
        "errors.md": errors_page(),
        "command_line.md": command_line_page(),
    }


def main() -> None:
    """Write the pages, and remove those that are not written any more."""
    written = pages()
    for old in FOLDER.rglob("*.md"):
        if str(old.relative_to(FOLDER)) not in written:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
