"""A Hugging Face Hub on this machine: it takes repositories, branches, files and their commits."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeHub:
    """What was pushed."""

    url: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    branches: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    """Content by path, of the last commit."""
    revision: str = ""
    message: str = ""
    tokens: set[str] = field(default_factory=set)
    validated: list[str] = field(default_factory=list)
    refuses: bool = False
    blobs: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """Run a hub at `url` during a `with` block."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def body(self) -> bytes:
            if length := self.headers.get("Content-Length"):
                return self.rfile.read(int(length))
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            return b"".join(parts)

        def answer(self, content: Any, status: int = 200) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.answer({}, 404)

        do_HEAD = do_GET  # noqa: N815

        def do_PUT(self) -> None:
            hub.blobs[self.path.rpartition("/")[2]] = self.body()
            self.answer({})

        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("Authorization", ""))
            path, content = self.path.partition("?")[0], self.body()
            if hub.refuses:
                self.answer({"error": "no write access"}, 403)
            elif path == "/api/repos/create":
                given = json.loads(content)
                name = f"{given.get('organization') or 'me'}/{given['name']}"
                hub.repositories[name] = given
                self.answer({"url": f"{hub.url}/{name}"})
            elif path == "/api/validate-yaml":
                hub.validated.append(json.loads(content)["content"])
                self.answer({"errors": [], "warnings": []})
            elif "/branch/" in path:
                hub.branches.append(path.rpartition("/")[2])
                self.answer({})
            elif "/preupload/" in path:
                self.answer({"files": [plan(one) for one in json.loads(content)["files"]]})
            elif path.endswith("/info/lfs/objects/batch"):
                objects = [upload(one) for one in json.loads(content)["objects"]]
                self.answer({"transfer": "basic", "objects": objects})
            elif "/commit/" in path:
                hub.revision = path.rpartition("/")[2]
                commit([json.loads(line) for line in content.splitlines()])
                name = path.removeprefix("/api/models/").partition("/commit/")[0]
                url = f"{hub.url}/{name}/commit/{'a' * 40}"
                self.answer({"commitUrl": url, "commitOid": "a" * 40, "hookOutput": ""})
            else:
                self.answer({"error": path}, 404)

    def plan(file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def upload(one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "actions": {"upload": {"href": f"{hub.url}/blobs/{one['oid']}"}}}

    def commit(lines: list[dict[str, Any]]) -> None:
        hub.files.clear()
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    hub.message = value["summary"]
                case "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    hub.files[value["path"]] = hub.blobs[value["oid"]]
                case other:
                    raise AssertionError(other)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
