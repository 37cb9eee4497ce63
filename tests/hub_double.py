"""A small Hub on the loopback interface: accounts, repositories, branches, pull requests, and large files.

It speaks what the client huggingface_hub speaks without its Xet storage (HF_HUB_DISABLE_XET), and can be told to refuse
or to hang up. A branch is a list of commits; a commit holds all files.
"""

import hashlib
import json
import re
import socket
import threading
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

HANG_UP = 0  # in place of a status
LARGE, PART = 20_000, 16_384  # bytes: from here on a file is large; a part of an upload in several parts


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]
    number: int

    @property
    def oid(self) -> str:
        content = repr([self.number, self.message, sorted(self.files.items())])
        return hashlib.sha1(content.encode()).hexdigest()


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit("initial commit", {}, 0)]})


@dataclass
class Refusal:
    """Answer requests like this one (METHOD PATH) with a status, so many times, after letting some pass."""

    pattern: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 10**6
    skip: int = 0


class HubDouble:
    def __init__(self) -> None:
        self.accounts = {"hf_write": ("me", "write"), "hf_read": ("me", "read")}
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.refusals: list[Refusal] = []
        self.requests: list[str] = []
        self.watch: Callable[[str], None] = lambda request: None  # called with each request
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def sent(self, pattern: str) -> list[str]:
        """The requests so far that look like this."""
        return [request for request in self.requests if re.search(pattern, request)]

    def head(self, name: str, branch: str = "main") -> Commit:
        return self.repositories[name].branches[branch][-1]


class _Answer(Exception):
    def __init__(self, status: int, content: Any = None, **headers: str):
        self.status, self.content, self.headers = status, content, headers


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubDouble

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        request = f"{self.command} {unquote(self.path)}"
        self.hub.requests.append(request)
        self.hub.watch(request)
        try:
            self._refuse(request)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                body = self._chunks()
            raise self._route(body)
        except _Answer as answer:
            self._answer(answer)

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def _refuse(self, request: str) -> None:
        for refusal in self.hub.refusals:
            if not re.search(refusal.pattern, request) or not refusal.times:
                continue
            if refusal.skip:
                refusal.skip -= 1
                continue
            refusal.times -= 1
            if refusal.status == HANG_UP:
                self.rfile.read(min(4096, int(self.headers.get("Content-Length") or 0)))
                self.close_connection = True
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                raise _Answer(HANG_UP)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            raise _Answer(refusal.status, {"error": refusal.headers.get("X-Error-Message", "")}, **refusal.headers)

    def _chunks(self) -> bytes:
        body = b""
        while length := int(self.rfile.readline(), 16):
            body += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, answer: _Answer) -> None:
        if answer.status == HANG_UP:
            return
        content = b"" if answer.content is None else json.dumps(answer.content).encode()
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    # -- what is asked for -------------------------------------------------------------------------------------------

    def _route(self, body: bytes) -> _Answer:
        parts = urlsplit(self.path)
        for pattern, method in _ROUTES.items():
            if match := re.fullmatch(pattern, f"{self.command} {parts.path}"):
                arguments = [unquote(group) for group in match.groups()]
                return method(self, body, parse_qs(parts.query), *arguments)
        return _Answer(404, {"error": "not found"})

    def _user(self) -> tuple[str, str]:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.hub.accounts:
            words = "Invalid credentials in Authorization header"
            raise _Answer(401, {"error": words}, **{"X-Error-Message": words})
        return self.hub.accounts[token]

    def _writer(self, name: str) -> None:
        if not name.startswith(f"{self._user()[0]}/"):
            words = "You don't have the rights to create a model under this namespace"
            raise _Answer(403, {"error": words}, **{"X-Error-Message": words})

    def _repository(self, name: str) -> Repository:
        if name not in self.hub.repositories:
            raise _Answer(404, {"error": "Repository not found"}, **{"X-Error-Code": "RepoNotFound"})
        return self.hub.repositories[name]

    def _branch(self, name: str, revision: str) -> list[Commit]:
        branches = self._repository(name).branches
        if revision not in branches:
            raise _Answer(404, {"error": "Invalid rev id"}, **{"X-Error-Code": "RevisionNotFound"})
        return branches[revision]

    def whoami(self, body: bytes, query: Any) -> _Answer:
        name, role = self._user()
        return _Answer(200, {"name": name, "type": "user", "orgs": [], "auth": {"accessToken": {"role": role}}})

    def create(self, body: bytes, query: Any) -> _Answer:
        asked = json.loads(body)
        name = f"{asked.get('organization') or self._user()[0]}/{asked['name']}"
        self._writer(name)
        if name in self.hub.repositories:
            return _Answer(409, {"url": f"{self.hub.endpoint}/{name}", "error": "You already created this model repo"})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories[name] = Repository(private)
        return _Answer(200, {"url": f"{self.hub.endpoint}/{name}"})

    def info(self, body: bytes, query: Any, name: str, revision: str = "main") -> _Answer:
        commit = self._branch(name, revision)[-1]
        files = [{"rfilename": path} for path in commit.files]
        told = {"id": name, "modelId": name, "sha": commit.oid, "private": self._repository(name).private}
        return _Answer(200, {**told, "siblings": files, "tags": [], "downloads": 0, "likes": 0})

    def branch(self, body: bytes, query: Any, name: str, branch: str) -> _Answer:
        self._writer(name)
        branches = self._repository(name).branches
        if branch in branches:
            return _Answer(409, {"error": "Reference already exists"})
        branches[branch] = list(branches["main"])
        return _Answer(200, {})

    def validate(self, body: bytes, query: Any) -> _Answer:
        found = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
        if found is None or not isinstance(yaml.safe_load(found[1]), dict):
            return _Answer(400, {"errors": [{"message": "empty metadata"}], "warnings": []})
        return _Answer(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, query: Any, name: str, revision: str) -> _Answer:
        self._user()
        held = self._branch(name, revision)[-1].files
        answers = []
        for file in json.loads(body)["files"]:
            large = file["size"] >= LARGE
            told = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if (content := held.get(file["path"])) is not None:
                git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                told["oid"] = hashlib.sha256(content).hexdigest() if large else git
            answers.append(told)
        return _Answer(200, {"files": answers})

    def batch(self, body: bytes, query: Any, name: str) -> _Answer:
        self._repository(name)
        return _Answer(
            200, {"transfer": "multipart", "objects": [self._object(o) for o in json.loads(body)["objects"]]}
        )

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        oid, size, place = asked["oid"], asked["size"], self.hub.endpoint
        if oid in self.hub.large:
            return {"oid": oid, "size": size}
        upload: dict[str, Any] = {"href": f"{place}/large/{oid}"}
        if size > 2 * PART:
            count = -(-size // PART)
            urls = {f"{number:05}": f"{place}/part/{oid}/{number}" for number in range(1, count + 1)}
            upload = {"href": f"{place}/complete/{oid}", "header": {"chunk_size": str(PART), **urls}}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": {"href": f"{place}/verify"}}}

    def large(self, body: bytes, query: Any, oid: str) -> _Answer:
        return self._keep(oid, body)

    def part(self, body: bytes, query: Any, oid: str, number: str) -> _Answer:
        self.hub.parts[oid, int(number)] = body
        return _Answer(200, ETag=hashlib.md5(body).hexdigest())

    def complete(self, body: bytes, query: Any, oid: str) -> _Answer:
        parts = [self.hub.parts[oid, part["partNumber"]] for part in json.loads(body)["parts"]]
        return self._keep(oid, b"".join(parts))

    def _keep(self, oid: str, content: bytes) -> _Answer:
        if hashlib.sha256(content).hexdigest() != oid:
            return _Answer(400, {"error": "these are other bytes"})
        self.hub.large[oid] = content
        return _Answer(200, {})

    def verify(self, body: bytes, query: Any) -> _Answer:
        return _Answer(200 if json.loads(body)["oid"] in self.hub.large else 404, {})

    def commit(self, body: bytes, query: Any, name: str, revision: str) -> _Answer:
        proposed = "create_pr" in query
        if not proposed:
            self._writer(name)
        branch = self._branch(name, revision)
        lines = [json.loads(line) for line in body.splitlines()]
        header, files = lines[0]["value"], dict(branch[-1].files)
        if header.get("parentCommit") not in (None, branch[-1].oid):
            return _Answer(
                412, {"error": "A commit has happened since"}, **{"X-Error-Message": "A commit has happened since"}
            )
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            else:
                del files[value["path"]]
        made = Commit(header["summary"], files, len(branch))
        address = None
        if proposed:
            branches = self._repository(name).branches
            number = sum(key.startswith("refs/pr/") for key in branches) + 1
            branches[f"refs/pr/{number}"] = [*branch, made]
            address = f"{self.hub.endpoint}/{name}/discussions/{number}"
        else:
            branch.append(made)
        url = f"{self.hub.endpoint}/{name}/commit/{made.oid}"
        return _Answer(200, {"success": True, "commitUrl": url, "commitOid": made.oid, "pullRequestUrl": address})


_ID = r"([^/]+/[^/]+)"
_ROUTES: dict[str, Callable[..., _Answer]] = {
    "GET /api/whoami-v2": _Handler.whoami,
    "POST /api/repos/create": _Handler.create,
    "POST /api/validate-yaml": _Handler.validate,
    f"GET /api/models/{_ID}": _Handler.info,
    f"GET /api/models/{_ID}/revision/([^/]+)": _Handler.info,
    f"POST /api/models/{_ID}/branch/([^/]+)": _Handler.branch,
    f"POST /api/models/{_ID}/preupload/([^/]+)": _Handler.preupload,
    f"POST /api/models/{_ID}/commit/([^/]+)": _Handler.commit,
    f"POST /{_ID}\\.git/info/lfs/objects/batch": _Handler.batch,
    "PUT /large/([^/]+)": _Handler.large,
    "PUT /part/([^/]+)/([0-9]+)": _Handler.part,
    "POST /complete/([^/]+)": _Handler.complete,
    "POST /verify": _Handler.verify,
}
