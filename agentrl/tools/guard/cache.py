"""Answers of calls that are declared pure: kept, and shared while they are made."""

import asyncio
import copy
import json
from collections.abc import MutableMapping
from functools import partial

from cachetools import LRUCache, TTLCache

from agentrl.plugins.call import contained
from agentrl.tools.base import ToolResult
from agentrl.tools.guard.path import Visit, Way
from agentrl.tools.settings import CacheSettings


class Cache:
    """Answer equal calls once: same arguments, same `execute_kwargs`, whatever the request.

    Only results enter: a `ToolError` may have been for the moment, and a failure is nobody's
    answer. Both are told to those that waited for the call, and not kept. Each asker gets a copy
    of its own, with reward and metrics. What cannot be written as JSON, or not be copied, is not
    shared.

    Equal calls that are under way at once are made once: the first goes on, the others wait. Where
    the first is cancelled, one of the others goes in its place.
    """

    def __init__(self, settings: CacheSettings) -> None:
        size, ttl_s = settings.max_entries, settings.ttl_s
        self._kept: MutableMapping[str, ToolResult] = (
            LRUCache(size) if ttl_s is None else TTLCache(size, ttl_s)
        )
        self._under_way: dict[str, asyncio.Future[ToolResult | None]] = {}

    async def __call__(self, visit: Visit, go_on: Way) -> ToolResult:
        """Answer from what is kept or under way; else go on and keep the answer."""
        key = _key_of(visit)
        if key is None:
            return await go_on(visit)
        while (kept := self._kept.get(key)) is None:
            first = self._under_way.get(key)
            if first is None:
                return await self._go_first(key, visit, go_on)
            visit.is_cached = True
            kept = await asyncio.shield(first)
            if kept is not None:
                break
            visit.is_cached = False
        visit.is_cached = True
        return contained(partial(copy.deepcopy, kept))

    async def _go_first(self, key: str, visit: Visit, go_on: Way) -> ToolResult:
        told = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            result = await go_on(visit)
        except Exception as error:
            told.set_exception(error)
            told.exception()  # perhaps nobody waits: that is no error
            raise
        else:
            self._keep(key, result, told)
            return result
        finally:
            del self._under_way[key]
            if not told.done():
                told.set_result(None)  # nothing to share: each of those who wait tries itself

    def _keep(
        self, key: str, result: ToolResult, told: "asyncio.Future[ToolResult | None]"
    ) -> None:
        try:
            kept = contained(partial(copy.deepcopy, result))
        except Exception:  # noqa: BLE001 - whatever a user's value raises in copying
            return
        self._kept[key] = kept
        told.set_result(kept)


def _key_of(visit: Visit) -> str | None:
    """Write a call as canonical JSON; None where that would not say it all."""
    asked = [visit.call.function.arguments, dict(visit.execute_kwargs)]
    try:
        text = json.dumps(asked, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None
    # Tuples, and keys that are no strings, come back as something else.
    return text if json.loads(text) == asked else None
