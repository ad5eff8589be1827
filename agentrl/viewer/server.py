"""Serve the pages on the loopback interface. The address holds a random token.

    GET /TOKEN/                                 the page (`static/`)
    GET /TOKEN/api/NAME?...                     JSON of `queries.py`, `steps.py`, `trajectories.py`
    GET /TOKEN/picture?run=0&file=...&name=...  an image or video that a line of the file names

A request without the token, or with another `Host` than the server's address, gets 403. Any other
path, and a parameter that is not valid, gets 404 with the reason as JSON.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from agentrl.errors import DataError, words_of
from agentrl.viewer import queries
from agentrl.viewer.queries import Filters, read_number
from agentrl.viewer.runs import RunReader
from agentrl.viewer.steps import describe_step
from agentrl.viewer.trajectories import RESPONSE, describe_trajectory, list_tokens

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("elements.js", "curves.js", "lists.js", "trajectory.js", "tokens.js", "pages.js")
"""In the order of the page: the first one defines what the others use, the last one starts."""
STATIC_FILES = {
    "": ("index.html", "text/html"),
    **{name: (name, "text/javascript") for name in SCRIPTS},
    "style.css": ("style.css", "text/css"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Name and type of each file by its path."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MAX_ROWS = 500
_INDEX_PERIOD_S = 5.0
"""Seconds between two looks for new files."""


class ViewServer:
    """Serves runs until `close`.

    Args:
        runs: The runs.
        port: 0 for a free one.
    """

    def __init__(self, runs: Sequence[RunReader], port: int = 0) -> None:
        self._runs = runs
        self._port = port
        self._token = secrets.token_urlsafe(16)
        self._runner: web.AppRunner | None = None
        self._indexing: asyncio.Task[None] | None = None
        self._unread: set[Path] = set()

    @property
    def address(self) -> str:
        """The address of the first page, with the token."""
        return f"http://127.0.0.1:{self._port}/{self._token}/"

    async def start(self) -> None:
        """Listen, and index the runs' files in the background.

        Raises:
            OSError: If the port is in use.
        """
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self._indexing = asyncio.create_task(self._index_all())

    async def close(self) -> None:
        """Stop listening."""
        if self._indexing is not None:
            self._indexing.cancel()
            with suppress(asyncio.CancelledError):
                await self._indexing
        if self._runner is not None:
            await self._runner.cleanup()

    async def _index_all(self) -> None:
        while True:
            for run in self._runs:
                for label, path in run.find_files().items():
                    await asyncio.to_thread(self._index_file, run, label, path)
            await asyncio.sleep(_INDEX_PERIOD_S)

    def _index_file(self, run: RunReader, label: str, path: Path) -> None:
        """Index a file and its advantages; log what fails once."""
        try:
            _ = run.index(label, path).advantages
        except FileNotFoundError:
            pass  # a resumed run has moved it
        except Exception as error:  # noqa: BLE001 - a file of any content; the others go on
            if path not in self._unread:
                self._unread.add(path)
                logger.warning("%s is not shown: %s", path, words_of(error))

    async def _answer(self, request: web.Request) -> web.Response:
        token, _, path = request.match_info["path"].partition("/")
        is_known = hmac.compare_digest(token.encode(), self._token.encode())
        hosts = (f"127.0.0.1:{self._port}", f"localhost:{self._port}")
        if not is_known or request.host not in hosts:
            return web.Response(status=403, text="403: use the address that was printed\n")
        if path in STATIC_FILES:
            name, kind = STATIC_FILES[path]
            body = (STATIC / name).read_bytes()
            return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)
        try:
            if path == "picture":
                body = await asyncio.to_thread(_read_picture, self._runs, request.query)
                return web.Response(body=body, content_type="image/png", headers=_HEADERS)
            text = await asyncio.to_thread(
                answer, self._runs, path.removeprefix("api/"), request.query
            )
        except (DataError, LookupError, OSError) as error:
            return _error(404, f"not found: {error}")
        except Exception as error:  # the page shows the reason
            logger.exception("no answer to %s", path)
            return _error(500, f"the server failed: {words_of(error)}")
        return web.Response(text=text, content_type="application/json", headers=_HEADERS)


def answer(runs: Sequence[RunReader], name: str, query: Mapping[str, str]) -> str:
    """Answer one query as JSON.

    Raises:
        LookupError: For an unknown query, run, file or trajectory.
        DataError: For a parameter that is not valid.
    """
    if name == "runs":
        return queries.to_json(queries.list_runs(runs))
    run = runs[_index(query, "run")]
    by_name: dict[str, Callable[[], Any]] = {
        "axes": lambda: queries.read_axes(run),
        "curve": lambda: queries.read_curve(run, query["name"]),
        "list": lambda: queries.list_trajectories(
            run,
            Filters.of(query),
            offset=_index(query, "offset"),
            limit=min(_index(query, "limit", 50), _MAX_ROWS),
        ),
        "choices": lambda: queries.list_choices(run, query.get("file", "")),
        "step": lambda: describe_step(run, query["file"]),
        "trajectory": lambda: describe_trajectory(run, query["id"]),
        "tokens": lambda: list_tokens(
            run,
            query["id"],
            sequence=_index(query, "sequence"),
            start=_index(query, "start"),
            part=query.get("part", RESPONSE),
        ),
    }
    return queries.to_json(by_name[name]())


def _read_picture(runs: Sequence[RunReader], query: Mapping[str, str]) -> bytes:
    """Read a picture that the lines of a rollout file name."""
    return runs[_index(query, "run")].index(query["file"]).picture(query["name"]).read_bytes()


def _index(query: Mapping[str, str], key: str, default: int = 0) -> int:
    value = read_number(query, key, default)
    if not (value >= 0 and value.is_integer()):
        raise DataError(f"{key} is {query[key]}", expected="a whole number, 0 or more")
    return int(value)


def _error(status: int, reason: str) -> web.Response:
    text = queries.to_json({"error": reason})
    return web.Response(status=status, text=text, content_type="application/json", headers=_HEADERS)
