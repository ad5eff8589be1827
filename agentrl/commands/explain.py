"""`agentrl config check`: explain a checked run file."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.commands.run_file import RunFile
from agentrl.config import comment, describe, naming_origin
from agentrl.config.problems import naming_file
from agentrl.data.order import DataOrder
from agentrl.trainer.components import check_names_and_engine
from agentrl.trainer.setup.datasets import load_run_data
from agentrl.trainer.setup.engine_factory import check_model_config, check_sampled
from agentrl.trainer.setup.huggingface import quiet_libraries
from agentrl.trainer.setup.preflight import is_made_later
from agentrl.trainer.setup.rollout_setup import make_rollout_setup, probe_model
from agentrl.workers.load import load_hf_config


def explain_config(file: RunFile, console: Console) -> None:
    """Print the resolved configuration, notes, plug-ins, chat template and data."""

    def say(*lines: str) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    quiet_libraries()
    config, plugins = file.config, file.plugins
    if file.report is not None:
        say(comment(file.report))
    say(describe(config))
    with naming_origin(file.overrides, file.report), naming_file(file.path):
        notes = [*file.notes, *check_names_and_engine(config, starts_here=False)]
    say(*(f"note: {note}" for note in notes))
    say(f"tools: {', '.join(tool.name for tool in plugins.tools) or 'none'}")
    say(f"interactions: {', '.join(plugins.interactions) or 'none'}")
    model = Path(config.model.tokenizer_path or config.model.path)
    files = [model, *config.data.train_files, *config.data.val_files.values()]
    if missing := [str(path) for path in files if is_made_later(config, path)]:
        return say(
            f"template and data: not checked, `prepare` must first make {', '.join(missing)}"
        )
    if (Path(config.model.path) / "config.json").is_file():
        found = load_hf_config(config.model)
        check_model_config(config, found, file=file.path)
        check_sampled(config, found)
    probed = probe_model(config, plugins)
    table = Table("chat template", "finding", show_lines=False)
    for what, finding in probed.report.describe():
        table.add_row(what, Text(finding))
    console.print(table)
    data = load_run_data(config, make_rollout_setup(config, plugins, probed))
    say(*(f"note: {note}" for note in data.notes))
    if not config.trainer.val_only:
        order = DataOrder(len(data.train), seed=config.data.seed)
        with naming_origin(file.overrides, file.report), naming_file(file.path):
            order.check_batch(config.prompts_per_rollout)
    sets = {"train": data.train, **data.val}
    return say(*(f"rows of {name}: {len(rows)}" for name, rows in sets.items()))
