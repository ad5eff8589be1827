"""What a tool or a scorer needs of the machine on which it runs."""

import math
from typing import Annotated

from pydantic import AfterValidator

_RAY_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}


def _check_resources(resources: dict[str, float]) -> dict[str, float]:
    for name, amount in resources.items():
        if name in _RAY_NAMES.values():
            raise ValueError(f"{name} is written num_{name.lower()}s")
        if not math.isfinite(amount) or amount <= 0:
            raise ValueError(f"{name} is {amount:g}; expected more than 0")
        if amount > 1 and amount != int(amount):
            raise ValueError(f"{name} is {amount:g}; above 1 only whole numbers are possible")
    return resources


PluginResources = Annotated[dict[str, float], AfterValidator(_check_resources)]
"""`num_cpus`, `num_gpus`, and custom resources of Ray by their names; each more than 0."""


def make_bundle(resources: dict[str, float]) -> dict[str, float]:
    """Return resources by the names that Ray uses.

    Example:
        >>> make_bundle({"num_cpus": 4, "index": 1})
        {'CPU': 4, 'index': 1}
    """
    return {_RAY_NAMES.get(name, name): amount for name, amount in resources.items()}
