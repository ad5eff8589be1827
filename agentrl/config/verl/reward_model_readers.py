"""Readers of the values of `reward_model`; see `agentrl.config.verl.mapping`.

verl reads these keys only if `reward_model.enable` is true. Then the reward model replaces the
scorer, in verl and here. If it is false, only `reward_model` itself is called.
"""

from typing import Any

from agentrl.config.verl.mapping import (
    Ignored,
    KeyMapping,
    Mapped,
    Tree,
    Unsupported,
    count,
    integer,
)
from agentrl.errors import ConfigError

SECTION = "reward_model"
_DYNAMIC = (
    f"{SECTION}.use_dynamic_bsz", "critic.use_dynamic_bsz",
    "actor_rollout_ref.actor.use_dynamic_bsz",
)  # fmt: skip
"""verl's default of each is the next one."""


def reward_model(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Score with a reward model, and with nothing else, as verl does."""
    if not value:
        return Mapped()
    path = f"{SECTION}.model.path"
    if tree.value(path) is None:
        raise ConfigError(
            f"is true, and {path} is missing: verl's default is a path of its authors",
            expected=f"{path}, a sequence-classification model",
        )
    defaults = {"reward.weights.trajectory": 0.0, "reward.model.truncation": "right"}
    chosen = {key: default for key, default in defaults.items() if not tree.is_given(key)}
    is_alone = "reward.weights.trajectory" in chosen
    return Mapped(chosen, "as in verl, no scorer counts besides it" if is_alone else "")


def of_reward_model(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Take the value as it is; null keeps agentrl's default."""
    return Mapped() if value is None else Mapped({row.ours[0]: value})


def speed_of_reward_model(value: Any, tree: Tree, row: KeyMapping) -> Unsupported:
    """Report a key that changes only speed and memory; its entry's note says what is done here."""
    return Unsupported(row.note)


def input_tokenizer(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Render with the reward model's own template; the policy's tokenizer is not needed for it."""
    theirs = (
        "verl gives it the policy's tokens" if value is None
        else "verl renders the whole response as one message of the assistant"
    )  # fmt: skip
    note = f"the messages are rendered one by one with the reward model's template; {theirs}"
    return Mapped(note=note)


def reward_strategy(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Accept the strategies of verl's FSDP trainer."""
    if value not in (None, "fsdp", "fsdp2"):
        raise ConfigError(
            f"is {value!r}, and FSDP2 alone shards weights here", expected="fsdp or fsdp2"
        )
    return Mapped()


def reward_library(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Import a module at the start, as `plugins` does."""
    return Mapped({row.ours[0]: [value]} if value else {})


def reward_type(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Accept a model that gives a number; refuse one that writes a verdict."""
    if value not in (None, "discriminative"):
        raise ConfigError(
            f"is {value!r}, and {SECTION}.enable reads a model with a head of one label",
            expected="discriminative; a model that writes a verdict is the bundled scorer `judge` "
            "(reward.functions), or your own scorer that calls its server",
        )
    return Mapped()


def reward_servers(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Score on servers that run already; agentrl starts none for a reward model."""
    if value is None:
        return Mapped()
    if not tree.value("reward.model.addresses"):
        raise ConfigError(
            f"is {value!r}: verl would start servers for the reward model, and agentrl starts none",
            expected="reward.model.addresses=[http://HOST:PORT] of SGLang servers that you start "
            "with --is-embedding; or no reward_model.rollout, and the training devices score; a "
            "model that writes a verdict is the bundled scorer `judge` (reward.functions)",
        )
    return Mapped({row.ours[0]: "sglang"}, "the servers at reward.model.addresses score")


def reward_processor(value: Any, tree: Tree, row: KeyMapping) -> Mapped:
    """Refuse a function that would rewrite what the reward model reads."""
    if value not in (None, {}):
        raise ConfigError(
            f"is {value!r}: the conversation is rendered with the reward model's own template",
            expected="null, or a scorer of your own (custom_reward_function)",
        )
    return Mapped()


def reward_tokens(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Take the tokens of a batch, which verl reads only for dynamic batches."""
    if not _is_dynamic(tree):
        return Ignored("use_dynamic_bsz is false")
    return Mapped() if value is None else Mapped({row.ours[0]: value})


def reward_rows(value: Any, tree: Tree, row: KeyMapping) -> Mapped | Ignored:
    """Convert rows of a batch into tokens: as many as that many of the longest rows have."""
    if _is_dynamic(tree):
        return Ignored("use_dynamic_bsz is true")
    if value is None:
        return Mapped()
    longest = tree.value(f"{SECTION}.max_length")
    if longest is None:
        longest = count(tree, "data.max_prompt_length") + count(tree, "data.max_response_length")
    tokens = integer(value) * integer(longest, f"{SECTION}.max_length")
    return Mapped({row.ours[0]: tokens}, f"{value} rows of at most {longest} tokens")


def _is_dynamic(tree: Tree) -> bool:
    values = (tree.value(key) for key in _DYNAMIC)
    return bool(next((value for value in values if value is not None), False))
