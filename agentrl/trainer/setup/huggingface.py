"""Check hub names and whether the Hugging Face hub is reachable; silence its libraries."""

import os
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars, validate_repo_id
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging

PATIENCE_S = 10.0
"""Seconds to wait for the hub's answer."""


def is_hub_name(name: str) -> bool:
    """Return whether a hub model can have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_within_reach(name: str) -> bool:
    """Return whether the cache has files of a model, or the hub answers at all.

    The hub is queried once; its answer about the model is reported when the model is loaded.
    """
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    if (cached / "snapshots").is_dir():
        return True
    try:
        get_hf_file_metadata(hf_hub_url(name, constants.CONFIG_NAME), timeout=PATIENCE_S)
    except HfHubHTTPError:
        return True
    except Exception:  # noqa: BLE001 - HTTP clients have errors of their own for no connection
        return False
    return True


def quiet_libraries() -> None:
    """Silence progress bars and advice of transformers, and retry messages of the hub's client.

    A download from the hub keeps its progress bar. `TRANSFORMERS_VERBOSITY` and
    `HF_HUB_VERBOSITY` take precedence if they are set.
    """
    hub_was_silent = are_progress_bars_disabled()
    logging.disable_progress_bar()
    if not hub_was_silent:
        enable_progress_bars()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    if "HF_HUB_VERBOSITY" not in os.environ:
        hub_logging.set_verbosity_error()
