"""A small stand-in for the hub's API, as its own client speaks with it: commits and downloads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import yaml

COMMIT = "0" * 40


class _Handler(BaseHTTPRequestHandler):
    repositories: ClassVar[dict[str, dict[str, bytes]]] = {}
    objects: ClassVar[dict[str, bytes]] = {}
    settings: ClassVar[dict[str, Any]] = {}

    def log_message(self, format: str, *values: object) -> None:
        """Nothing is printed."""

    def do_POST(self) -> None:
        body, path = self._body(), self.path.split("?")[0]
        if self.headers.get("authorization") != "Bearer hf_right":
            self._answer({"error": "Invalid credentials"}, 401)
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            self.repositories.setdefault(name, {})
            self.settings[name] = wanted
            self._answer({"url": f"{self._root}/{name}", "id": name, "name": name})
        elif path == "/api/validate-yaml":
            _, header, _ = json.loads(body)["content"].split("---\n", 2)
            known = {"library_name", "pipeline_tag", "tags", "base_model"}
            unknown = sorted(yaml.safe_load(header).keys() - known)
            self._answer({"errors": [{"message": name} for name in unknown], "warnings": []})
        elif re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            # As the hub: weights by LFS, text in the commit.
            self._answer({"files": [
                {"path": file["path"], "shouldIgnore": False, "oid": None,
                 "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                for file in json.loads(body)["files"]
            ]})  # fmt: skip
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._answer({"transfer": "basic", "objects": [
                {**each, "actions": {"upload": {"href": f"{self._root}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]})  # fmt: skip
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines() if line])
        else:
            self._answer({"error": "unknown"}, 404)

    def do_PUT(self) -> None:
        content = self._body()
        self.objects[hashlib.sha256(content).hexdigest()] = content
        self._answer({})

    def do_HEAD(self) -> None:
        self._send_file()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            files = self.repositories[found[1]]
            listed = [
                {"type": "file", "path": name, "size": len(files[name]), "oid": COMMIT}
                for name in files
            ]
            self._answer(listed)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            files = self.repositories.get(found[1])
            if files is None:
                self._answer({"error": "Repository not found"}, 404)
                return
            told = {"id": found[1], "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
            self._answer(told)
        else:
            self._send_file()

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = self.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
        url = f"{self._root}/{name}/commit/{COMMIT}"
        self._answer({"success": True, "commitUrl": url, "commitOid": COMMIT})

    def _send_file(self) -> None:
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path.split("?")[0])
        content = found and self.repositories.get(found[1], {}).get(found[2])
        if content is None:
            self._answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(content).hexdigest()
        self._answer(content, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    @property
    def _root(self) -> str:
        return f"http://{self.headers['host']}"

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(
        self, body: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def hub() -> Iterator[tuple[str, type[_Handler]]]:
    """The address of a hub that is empty, and what it holds; its token is hf_right."""
    fresh = type("Hub", (_Handler,), {"repositories": {}, "objects": {}, "settings": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), fresh)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fresh
    finally:
        server.shutdown()
        server.server_close()
