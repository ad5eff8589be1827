"""`agentrl serve`: SGLang servers for the model of a run file."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from agentrl.config import RunConfig, naming_origin, read_config
from agentrl.config.problems import naming_file
from agentrl.engines.sglang.arguments import check_given
from agentrl.engines.sglang.servers.launch import Say, ServeOptions, plan_servers, serve
from agentrl.errors import ConfigError
from agentrl.trainer.setup.engine_factory import sglang_needs
from agentrl.trainer.setup.huggingface import quiet_libraries
from agentrl.trainer.setup.plugins import import_plugins
from agentrl.trainer.setup.preflight import check_model_folders, is_made_later
from agentrl.workers.load import resolve_dtype


def serve_from_file(
    run_file: Path, overrides: Sequence[str], options: ServeOptions, *, say: Say
) -> None:
    """Start servers, print their addresses, and keep them running until Ctrl-C.

    Only the model, the lengths and `rollout.engine.sglang` of the file are used.

    Raises:
        ConfigError: for a missing model, a server argument that SGLang does not know, too few
            devices, a port that is in use.
        MissingExtraError: if SGLang is not installed.
        EngineError: if a server does not start, or died too often.
    """
    quiet_libraries()
    config, report = read_config(run_file, overrides)
    with naming_origin(overrides, report), naming_file(run_file):
        import_plugins(config.plugins)
        refuse_unmade_model(config, run_file)
        check_given(config.rollout.engine.sglang.server_arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    needs = replace(
        sglang_needs(config, resolve_dtype(config.model, device)),
        api_key=config.rollout.engine.sglang_server.api_key,
    )
    plans = plan_servers(needs, options)
    asyncio.run(serve(plans, say=say, max_restarts=options.max_restarts))


def refuse_unmade_model(config: RunConfig, run_file: Path) -> None:
    """Refuse a missing model.

    Raises:
        ConfigError: naming the command that makes it, if the run file prepares it.
    """
    if is_made_later(config, Path(config.model.path)):
        maker = "sft" if config.prepare.sft is not None else "rollout"
        raise ConfigError(
            f"{config.model.path} is not made yet",
            file=run_file,
            key="model.path",
            expected=f"run this first: agentrl {maker} {run_file}",
        )
    check_model_folders(config)
