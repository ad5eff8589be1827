"""Whether a name leads to the Hugging Face hub, and whether anything can be had from there."""

import os
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars, validate_repo_id
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging

PATIENCE_S = 10.0
"""Seconds that the hub may take to answer."""


def is_hub_name(name: str) -> bool:
    """Whether a model of the hub can be called so."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_within_reach(name: str) -> bool:
    """Whether something of a model lies in the cache, or the hub answers at all.

    The hub is asked once; what it says of the model is for the loading to tell.
    """
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    if (cached / "snapshots").is_dir():
        return True
    try:
        get_hf_file_metadata(hf_hub_url(name, constants.CONFIG_NAME), timeout=PATIENCE_S)
    except HfHubHTTPError:
        return True
    except Exception:  # noqa: BLE001 - the errors of a broken connection are the HTTP client's own
        return False
    return True


def quiet_libraries() -> None:
    """Silence the bars and advice of transformers; a download from the hub keeps its bar.

    What the hub's client says of each new try goes too. `TRANSFORMERS_VERBOSITY` and
    `HF_HUB_VERBOSITY`, where they are set, decide about the words of the two.
    """
    hub_was_silent = are_progress_bars_disabled()
    logging.disable_progress_bar()
    if not hub_was_silent:
        enable_progress_bars()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    if "HF_HUB_VERBOSITY" not in os.environ:
        hub_logging.set_verbosity_error()
