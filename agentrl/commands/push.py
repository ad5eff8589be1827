"""`agentrl push`: publish an exported policy on the Hugging Face Hub."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from agentrl.errors import ConfigError, StoreError
from agentrl.remote_io import reason_of
from agentrl.trainer.state.model_card import CARD, write_card
from agentrl.workers.checkpoint import MANIFEST

MODEL = "trained"
"""Folder of a run with the exported policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """The options of `agentrl push`."""

    private: bool = False
    """Make a new repository private."""
    revision: str | None = None
    """Branch to push to; it is made if it is missing. None: the main branch."""
    message: str | None = None
    """Message of the commit."""


def push(source: Path, repo: str, options: PushOptions, say: Callable[[str], None]) -> str:
    """Upload an exported policy with its model card, and return its address.

    Args:
        source: The folder of a run, or that of a model.
        repo: `owner/name`; it is made if it is missing.
        options: Visibility, branch and message.
        say: Prints a line.

    Raises:
        ConfigError: If there is no model, no token, or the name is not valid.
        StoreError: If the Hub cannot be reached, or refuses.
    """
    model = find_model(source)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(str(error), key="REPO", expected="owner/name") from None
    if get_token() is None:
        raise ConfigError(
            "no token of the Hugging Face Hub",
            expected="`hf auth login`, or a token in the variable HF_TOKEN",
        )
    if not (model / CARD).is_file() and model.parent == source.resolve():
        write_card(source, model)
    files = [path for path in model.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    say(f"pushing {len(files)} files, {size / 1e6:,.1f} MB, from {model}")
    api = HfApi(library_name="agentrl")
    try:
        name = api.create_repo(repo, private=options.private or None, exist_ok=True).repo_id
        if options.revision is not None:
            api.create_branch(name, branch=options.revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=name,
            folder_path=model,
            revision=options.revision,
            commit_message=options.message or f"Policy of {source.resolve().name}",
        )
    except Exception as error:
        # The client raises a plain error about a file from the one that has the reason.
        inner = error.__cause__ if type(error) is RuntimeError else None
        raise StoreError(
            "the model cannot be pushed",
            repository=repo,
            endpoint=api.endpoint,
            reason=reason_of(inner if isinstance(inner, Exception) else error),
            expected="a token that may write to the repository, and a connection to the Hub",
        ) from error
    return str(done)


def find_model(source: Path) -> Path:
    """Return the folder of the model: of a run, its `trained/`.

    Raises:
        ConfigError: If there is none.
    """
    folder = source.resolve()
    for model in (folder / MODEL, folder):
        if any((model / name).is_file() for name in ("config.json", "adapter_config.json")):
            return model
    what = f"no exported model in {source}" if folder.is_dir() else f"no folder {source}"
    expected = f"the folder of a run that has ended, with {MODEL}/, or a Hugging Face folder"
    if (folder / MANIFEST).is_file():
        what = f"{source} is a checkpoint, which other programs cannot load"
        expected = (
            "the run's folder; to export this step, train with trainer.resume_mode=resume_path "
            f"trainer.resume_from_path={source} and trainer.total_training_steps=N of this step"
        )
    raise ConfigError(what, key="FOLDER", expected=expected)
