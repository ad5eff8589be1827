"""Whether a name leads to the Hugging Face hub, and whether anything can be had from there."""

from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

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
