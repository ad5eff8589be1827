"""Load the scorers that a reward section names, and check their `reward_kwargs`."""

import dis
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from agentrl.config.schema.reward import RewardConfig, RewardFunctionConfig
from agentrl.errors import ConfigError, PluginError
from agentrl.plugins import load_object
from agentrl.plugins.call import call_method
from agentrl.plugins.keys import unknown_key
from agentrl.plugins.remote import RemoteObject
from agentrl.rewards.scoring import NamedScorer, ScoreFn, WeightedScorers
from agentrl.rewards.sources import (
    BUNDLED,
    BY_SOURCE,
    SOURCES,
    Bundled,
    default_compute_score,
    find_bundled,
    has_bundled,
    score_where_known,
)


class LoadedScorer(partial[Any]):
    """A scorer that was loaded by its path. Another process receives the path and loads it
    again.
    """

    path: str
    made_with: dict[str, Any]
    bundled: Bundled | None
    remote: RemoteObject | None = None
    """The process on a Ray cluster in which it scores; None: it scores in this one."""

    def __reduce__(self) -> Any:
        """Pickle the path, because a module that was loaded from a file cannot be imported by
        name.
        """
        return load_scorer, (self.path, self.made_with)

    async def close(self) -> None:
        """Call `close` of a scorer that is an object, if it has one."""
        holder = cast("Any", self.func)
        if not inspect.isroutine(holder) and hasattr(holder, "close"):
            await call_method(holder.close)


def load_scorer(path: str, kwargs: Mapping[str, Any]) -> ScoreFn:
    """Load a function and bind its arguments; build a class with them and call the object.

    Raises:
        PluginError: If the path is neither, the class cannot be built, or `kwargs` has a key that
            the run passes itself.
        ConfigError: If the function does not take an argument.
    """
    bundled = next((one for one in BUNDLED.values() if one.path == path), None)
    if bundled and bundled.needs_sandbox and "sandbox" in kwargs:
        raise PluginError("reward_kwargs names a sandbox", expected="its keys in reward.sandbox")
    found = load_object(path)
    if not callable(found):
        raise PluginError(f"{path!r} is {found!r}", expected="a function")
    if isinstance(found, type):
        scorer = LoadedScorer(_build(found, kwargs, path))
    else:
        check_arguments(found, kwargs)
        scorer = LoadedScorer(found, **kwargs)
    scorer.path, scorer.made_with, scorer.bundled = path, dict(kwargs), bundled
    return scorer


def _build(kind: type, kwargs: Mapping[str, Any], path: str) -> ScoreFn:
    try:
        made = kind(**kwargs)
    except TypeError as error:
        raise PluginError(f"{path!r}: {error}", expected="reward_kwargs that it takes") from error
    if not callable(made):
        raise PluginError(f"{path!r} is a class", expected="one with `__call__`, or a function")
    return made


def placed_scorers(config: RewardConfig) -> list[tuple[str, int | None, dict[str, float]]]:
    """List the scorers that ask for resources.

    Returns:
        For each its key (`PlacedPlugin.key`), its index in `reward.functions` (None: the custom
        reward function) and its resources.
    """
    custom = config.custom_reward_function
    if not config.functions:
        is_placed = custom is not None and custom.resources
        return [(f"scorer {custom.name}", None, custom.resources)] if custom and is_placed else []
    return [
        (f"scorer {function.name}", index, function.resources)
        for index, function in enumerate(config.functions)
        if function.resources
    ]


def load_bundled(name: str, kwargs: Mapping[str, Any] | None = None) -> ScoreFn:
    """Load a bundled scorer by its name.

    Raises:
        PluginError: If it does not exist.
        ConfigError: If it does not take an argument.
    """
    return load_scorer(BUNDLED[name].path, kwargs or {})


def choose_scorer(scorer: ScoreFn, data_source: str) -> ScoreFn:
    """Replace a function that looks a scorer up by the bundled scorer of the row.

    Raises:
        RewardError: If the data source has none.
    """
    flat: partial[Any] = partial(scorer)  # flattens nested partials
    is_lookup = flat.func is default_compute_score
    if is_lookup or (flat.func is score_where_known and has_bundled(data_source)):
        return load_bundled(find_bundled(data_source), flat.keywords)
    return scorer


def bundled_in(config: RewardConfig, sources: Iterable[str] = ()) -> list[Bundled]:
    """List the bundled scorers that a reward section uses.

    Args:
        config: The reward section.
        sources: The `data_source` of the rows, if they are known.

    Raises:
        RewardError: If the sources choose the scorers, and one source has none.
    """
    functions, custom = config.functions, config.custom_reward_function
    names = [function.name for function in functions if function.path is None]
    paths = [f"{function.path}:{function.function}" for function in functions]
    if not functions:
        paths = [] if custom is None else [f"{custom.path}:{custom.name}"]
    if scores_by_source(config):
        needed = (s for s in sources if config.weights.trajectory or has_bundled(s))
        names += map(find_bundled, needed)
    return [one for name, one in BUNDLED.items() if name in names or one.path in paths]


def scores_by_source(config: RewardConfig) -> bool:
    """Whether the `data_source` of a row chooses its scorer, alone or among others."""
    if config.functions:
        return any(f.name == BY_SOURCE and f.path is None for f in config.functions)
    return config.custom_reward_function is None


def bundled_of(scorer: ScoreFn) -> Bundled | None:
    """Return the entry of a bundled scorer; None if the scorer is not bundled."""
    return scorer.bundled if isinstance(scorer, LoadedScorer) else None


def is_bundled_scorer(scorer: ScoreFn) -> bool:
    """Return whether a scorer is a bundled one, or looks one up by the `data_source` of a row."""
    flat: partial[Any] = partial(scorer)
    looks_up = flat.func in (default_compute_score, score_where_known)
    return looks_up or bundled_of(scorer) is not None


def name_of(scorer: ScoreFn, data_source: str) -> str:
    """Return the path or the name by which a user knows the scorer of a source.

    Example:
        >>> name_of(default_compute_score, "openai/gsm8k")
        'gsm8k'
    """
    flat: partial[Any] = partial(scorer)
    if flat.func in (default_compute_score, score_where_known):
        return find_bundled(data_source) if has_bundled(data_source) else BY_SOURCE
    if isinstance(scorer, LoadedScorer):
        named = (name for name, bundled in BUNDLED.items() if bundled is scorer.bundled)
        return next(named, scorer.path)
    function = flat.func
    return str(function.__qualname__ if inspect.isroutine(function) else type(function).__name__)


def parts_of(scorer: ScoreFn) -> list[ScoreFn]:
    """List the parts of weighted scorers, or the one scorer."""
    return [p.scorer for p in scorer.parts] if isinstance(scorer, WeightedScorers) else [scorer]


def mentions_ground_truth(scorer: ScoreFn) -> bool:
    """Whether the code of a scorer reads its argument `ground_truth` (`ground_truths`)."""
    function = _without_arguments(scorer)
    called = function if inspect.isroutine(function) else type(function).__call__
    code = getattr(inspect.unwrap(called), "__code__", None)  # none if it is written in C
    return code is not None and any(
        read.opname.startswith("LOAD") and "ground_truth" in str(read.argval)
        for read in dis.get_instructions(code)
    )


def is_async(scorer: ScoreFn) -> bool:
    """Whether a scorer must be awaited: an `async def`, or an object with an async `__call__`."""
    function = _without_arguments(scorer)
    if inspect.isfunction(function) or inspect.ismethod(function):
        return inspect.iscoroutinefunction(function)
    return inspect.iscoroutinefunction(type(function).__call__)


def _without_arguments(scorer: ScoreFn) -> ScoreFn:
    while isinstance(scorer, partial):
        scorer = cast("ScoreFn", scorer.func)
    return scorer


def load_scorers(config: RewardConfig) -> ScoreFn | WeightedScorers:
    """Load all scorers of a reward section.

    Raises:
        PluginError: If a path does not lead to a scorer.
        ConfigError: If a scorer does not take its `reward_kwargs`.
    """
    by_source = default_compute_score if config.weights.trajectory else score_where_known
    if not config.functions:
        if config.custom_reward_function is None:
            return by_source
        with _naming("reward.custom_reward_function"):
            custom = config.custom_reward_function
            return load_scorer(f"{custom.path}:{custom.name}", custom.reward_kwargs)
    parts: list[NamedScorer] = []
    for index, function in enumerate(config.functions):
        with _naming(f"reward.functions[{index}]"):
            scorer = _load_function(function, by_source)
            parts.append(NamedScorer(function.name, scorer, function.weight))
    return WeightedScorers(parts)


@contextmanager
def _naming(section: str) -> Generator[None]:
    """Put the section in front of the key of an error of the `with` block."""
    try:
        yield
    except (ConfigError, PluginError) as error:
        error.details["key"] = f"{section}.{error.details.get('key', 'path')}"
        raise


def _load_function(config: RewardFunctionConfig, by_source: ScoreFn) -> ScoreFn:
    if config.path is not None:
        return load_scorer(f"{config.path}:{config.function}", config.reward_kwargs)
    if config.name == BY_SOURCE:
        check_arguments_by_source(config.reward_kwargs)
        return partial(by_source, **config.reward_kwargs)
    if config.name not in BUNDLED:
        names = ", ".join([*BUNDLED, BY_SOURCE])
        message = f"no bundled scorer {config.name!r}"
        raise PluginError(message, key="name", expected=f"a path, or {names}")
    return load_bundled(config.name, config.reward_kwargs)


KEY = "reward_kwargs"
GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments that the run passes to every scorer."""


def check_arguments(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Check that a scorer takes these arguments.

    Raises:
        ConfigError: If it does not take one; it suggests the nearest known one.
    """
    if kwargs:
        _check(kwargs, arguments_of(function))


def check_arguments_by_source(kwargs: Mapping[str, Any]) -> None:
    """Check that a bundled scorer of some `data_source` takes each argument.

    Raises:
        ConfigError: If none takes an argument.
    """
    if kwargs:
        names = sorted(set(SOURCES.values()))
        taken = [arguments_of(BUNDLED[name].load()) or set[str]() for name in names]
        _check(kwargs, set[str]().union(*taken))


def arguments_of(function: Callable[..., Any]) -> set[str] | None:
    """Return the names of a scorer's own arguments; None if it accepts any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C: it has no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name} - set(GIVEN)


def _check(kwargs: Mapping[str, Any], known: set[str] | None) -> None:
    for name in kwargs:
        if known is not None and name not in known:
            raise unknown_key(name, sorted(known), file=None, parent=KEY)
