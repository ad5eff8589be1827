"""Remove secrets from a configuration before it is printed or saved."""

import os
import re
from collections.abc import Mapping
from typing import Any, cast

REDACTED = "[redacted]"
_SECRET_NAME = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret(_key)?|password|passwd|authorization|"
    r"credentials?|(api_|auth_|access_|bearer_|hf_|hub_|refresh_)token|webhook_url)$|^token$"
)
_MIN_CHARACTERS = 8
"""Shorter values of environment variables occur in too many texts."""


def without_secrets(tree: Any) -> Any:
    """Copy a tree of mappings and lists, and replace each secret.

    A text is a secret if its key is the name of one (`api_key`, `password`, `token`,
    `Authorization`). The value of an environment variable with such a name is replaced in every
    text, so that `${oc.env:JUDGE_API_KEY}` stays a secret under any key.

    Example:
        >>> without_secrets({"judge": {"api_key": "sk-1", "model": "m", "max_tokens": 5}})
        {'judge': {'api_key': '[redacted]', 'model': 'm', 'max_tokens': 5}}
    """
    named = (value for name, value in os.environ.items() if is_secret_name(name))
    secrets = sorted({v for v in named if len(v) >= _MIN_CHARACTERS}, key=len, reverse=True)
    return _copy(tree, secrets)


def is_secret_name(name: str) -> bool:
    """Whether a key, header or variable of this name has a secret as its value.

    Example:
        >>> is_secret_name("X-API-Key"), is_secret_name("api_key_env"), is_secret_name("pad_token")
        (True, False, False)
    """
    return _SECRET_NAME.search(name.lower().replace("-", "_")) is not None


def _copy(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: REDACTED
            if held and isinstance(held, str) and is_secret_name(str(key))
            else _copy(held, secrets)
            for key, held in cast("Mapping[Any, Any]", value).items()
        }
    if isinstance(value, list | tuple):
        return [_copy(item, secrets) for item in cast("list[Any]", value)]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REDACTED)
    return value
