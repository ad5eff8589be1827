"""Keep the console for what a run says of itself."""

import os

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging


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
