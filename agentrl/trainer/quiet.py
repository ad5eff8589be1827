"""Keep the console for what a run says of itself."""

import os

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers.utils import logging


def quiet_libraries() -> None:
    """Silence the bars and advice of transformers; a download from the hub keeps its bar.

    `TRANSFORMERS_VERBOSITY`, where it is set, decides about the advice.
    """
    hub_was_silent = are_progress_bars_disabled()
    logging.disable_progress_bar()
    if not hub_was_silent:
        enable_progress_bars()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
