"""From the reward section to the scorer that it names."""

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from agentrl.config.schema.reward import CustomRewardConfig, RewardConfig, RewardFunctionConfig
from agentrl.errors import ConfigError, PluginError
from agentrl.plugins import load_object
from agentrl.plugins.call import call_method
from agentrl.plugins.keys import unknown_key
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
    """A scorer found by its path. Another process gets the path, and loads it anew."""

    path: str
    made_with: dict[str, Any]
    bundled: Bundled | None

    def __reduce__(self) -> Any:
        """Pickle the path: a module that was loaded from a file has no name to import."""
        return load_scorer, (self.path, self.made_with)

    async def close(self) -> None:
        """Let a scorer that is an object close what it holds, where it has a `close`."""
        holder = cast("Any", self.func)
        if not inspect.isroutine(holder) and hasattr(holder, "close"):
            await call_method(holder.close)


def load_scorer(path: str, kwargs: Mapping[str, Any]) -> ScoreFn:
    """Load a function, and bind its arguments; a class is built with them, and called.

    Raises:
        PluginError: where the path leads to neither, the class cannot be built, or the arguments
            name what the run hands over itself.
        ConfigError: for arguments that the function does not take.
    """
    bundled = next((one for one in BUNDLED.values() if one.path == path), None)
    if bundled and bundled.needs_sandbox and "sandbox" in kwargs:
        raise PluginError("reward_kwargs names a sandbox", expected="its keys in reward.sandbox")
    found = load_object(path)
    if not callable(found):
        raise PluginError(f"{path!r} leads to {found!r}", expected="a function")
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
        raise PluginError(
            f"{path!r} leads to a class", expected="one with `__call__`, or a function"
        )
    return made


def load_bundled(name: str, kwargs: Mapping[str, Any] | None = None) -> ScoreFn:
    """Load a bundled scorer by its name.

    Raises:
        PluginError: where it is not there.
        ConfigError: for arguments that it does not take.
    """
    return load_scorer(BUNDLED[name].path, kwargs or {})


def choose_scorer(scorer: ScoreFn, data_source: str) -> ScoreFn:
    """Put the bundled scorer of a row in the place of the function that would look for it.

    Raises:
        RewardError: for a data source that has none.
    """
    whole: partial[Any] = partial(scorer)  # of a partial it is that one, flattened
    looks = whole.func is default_compute_score
    if not looks and not (whole.func is score_where_known and has_bundled(data_source)):
        return scorer
    return load_bundled(find_bundled(data_source), whole.keywords)


def bundled_in(config: RewardConfig, sources: Iterable[str] = ()) -> list[Bundled]:
    """List the bundled scorers to which a reward section leads.

    Args:
        config: It.
        sources: The `data_source` of the rows, where they are known.

    Raises:
        RewardError: for a source that has none, where the rows' sources say who scores.
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
    """Whether the `data_source` of a row says who scores it, alone or beside others."""
    if config.functions:
        return any(f.name == BY_SOURCE and f.path is None for f in config.functions)
    return config.custom_reward_function is None


def bundled_of(scorer: ScoreFn) -> Bundled | None:
    """Say which of the bundled scorers this is; None: none of them."""
    return scorer.bundled if isinstance(scorer, LoadedScorer) else None


def name_of(scorer: ScoreFn, data_source: str) -> str:
    """Name the function that scores rows of a source, as a user knows it: a path, or a name.

    Example:
        >>> name_of(default_compute_score, "openai/gsm8k")
        'gsm8k'
    """
    whole: partial[Any] = partial(scorer)
    if whole.func in (default_compute_score, score_where_known):
        return find_bundled(data_source) if has_bundled(data_source) else BY_SOURCE
    if isinstance(scorer, LoadedScorer):
        named = (name for name, bundled in BUNDLED.items() if bundled is scorer.bundled)
        return next(named, scorer.path)
    function = whole.func
    return str(function.__qualname__ if inspect.isroutine(function) else type(function).__name__)


def parts_of(scorer: ScoreFn) -> list[ScoreFn]:
    """List the scorers that one is made of."""
    return [p.scorer for p in scorer.parts] if isinstance(scorer, WeightedScorers) else [scorer]


def is_async(scorer: ScoreFn) -> bool:
    """Whether a scorer is to be awaited: an `async def`, or an object that is called so."""
    function = scorer
    while isinstance(function, partial):
        function = cast("ScoreFn", function.func)
    if inspect.isfunction(function) or inspect.ismethod(function):
        return inspect.iscoroutinefunction(function)
    return inspect.iscoroutinefunction(type(function).__call__)


def load_compute_score(config: CustomRewardConfig | None) -> ScoreFn:
    """Find the configured scorer: the user's own, or the bundled one of each `data_source`.

    Raises:
        PluginError: where the path does not lead to a function.
    """
    if config is None:
        return default_compute_score
    return load_scorer(f"{config.path}:{config.name}", config.reward_kwargs)


def load_scorers(config: RewardConfig) -> ScoreFn | WeightedScorers:
    """Find all that a reward section names.

    Raises:
        PluginError: where a path does not lead to a function.
        ConfigError: for `reward_kwargs` that a scorer does not take.
    """
    by_source = default_compute_score if config.weights.trajectory else score_where_known
    if not config.functions:
        if config.custom_reward_function is None:
            return by_source
        with _naming("reward.custom_reward_function"):
            return load_compute_score(config.custom_reward_function)
    parts: list[NamedScorer] = []
    for place, function in enumerate(config.functions):
        with _naming(f"reward.functions[{place}]"):
            scorer = _load_function(function, by_source)
            parts.append(NamedScorer(function.name, scorer, function.weight))
    return WeightedScorers(parts)


@contextmanager
def _naming(section: str) -> Generator[None]:
    """Say of an error of the `with` block in which section its key stands."""
    try:
        yield
    except (ConfigError, PluginError) as error:
        key = error.details.get("key")
        error.details["key"] = f"{section}.{key}" if key else section
        raise


def _load_function(config: RewardFunctionConfig, by_source: ScoreFn) -> ScoreFn:
    if config.path is not None:
        return load_scorer(f"{config.path}:{config.function}", config.reward_kwargs)
    if config.name == BY_SOURCE:
        check_arguments_by_source(config.reward_kwargs)
        return partial(by_source, **config.reward_kwargs)
    if config.name not in BUNDLED:
        names = ", ".join([*BUNDLED, BY_SOURCE])
        raise PluginError(f"no bundled scorer {config.name!r}", expected=f"a path, or {names}")
    return load_bundled(config.name, config.reward_kwargs)


KEY = "reward_kwargs"
TOLD = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
"""What every scorer is told of a request, whatever `reward_kwargs` say."""


def check_arguments(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Check that a scorer takes these arguments.

    Raises:
        ConfigError: naming the first that it does not, and the nearest that it does.
    """
    if kwargs:
        _check(kwargs, arguments_of(function))


def check_arguments_by_source(kwargs: Mapping[str, Any]) -> None:
    """Check that each argument is one of a bundled scorer to which a `data_source` leads.

    Raises:
        ConfigError: naming the first that no such scorer takes.
    """
    if kwargs:
        names = sorted(set(SOURCES.values()))
        taken = [arguments_of(BUNDLED[name].load()) or set[str]() for name in names]
        _check(kwargs, set[str]().union(*taken))


def arguments_of(function: Callable[..., Any]) -> set[str] | None:
    """List what a scorer takes beside what it is told; None: whatever it is given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C: it has no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name} - TOLD


def _check(kwargs: Mapping[str, Any], known: set[str] | None) -> None:
    for name in kwargs:
        if known is not None and name not in known:
            raise unknown_key(name, sorted(known), file=None, parent=KEY)
