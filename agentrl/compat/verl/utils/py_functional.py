"""`verl.utils.py_functional`."""

from collections.abc import Mapping
from typing import Any


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Append each value to the list under its key."""
    for key, value in new_data.items():
        data.setdefault(key, []).append(value)
