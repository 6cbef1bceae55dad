"""The Hub's HTTP protocol, as far as huggingface_hub needs it for models: who one is, repositories,
files, commits.

Written from what the client sends and expects. Everything is kept in memory.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


# Each token's user and role. Both users may write in the organization "org".
TOKENS = {
    "hf_write": ("user", "write"),
    "hf_read": ("user", "read"),
    "hf_other": ("other", "write"),
}
LFS_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pkl", "*.png")
LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "other"}
LANGUAGES = {"en", "de", "fr", "multilingual"}


@dataclass
class Commit:
    """One commit: its hash, its message, and all files of the repository by path."""

    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repo:
    """A repository with the branch main."""

    name: str
    private: bool = False
    commits: list[Commit] = field(default_factory=list)

    def commit(self, message: str, changes: dict[str, bytes | None]) -> Commit:
        """Add a commit; a content of None deletes the file."""
        files = {**(self.commits[-1].files if self.commits else {}), **changes}
        files = {path: content for path, content in files.items() if content is not None}
        oid = hashlib.sha1(f"{self.name} {len(self.commits)}".encode()).hexdigest()
        self.commits.append(Commit(oid, message, files))
        return self.commits[-1]

    @property
    def head(self) -> Commit:
        return self.commits[-1]


@dataclass
class Store:
    """All repositories, and the large files that were uploaded, whether committed or not, by
    SHA-256.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.response = JSONResponse({"error": message}, status, headers)


def application(store: Store) -> Starlette:
    """The server of a store."""
    routes = [
        Route("/api/whoami-v2", whoami),
        Route("/api/validate-yaml", validate_yaml, methods=["POST"]),
        Route("/api/repos/create", create, methods=["POST"]),
        Route("/api/models/{user}/{name}", info),
        Route("/api/models/{user}/{name}/revision/{revision}", info),
        Route("/api/models/{user}/{name}/tree/{revision}", tree),
        Route("/api/models/{user}/{name}/tree/{revision}/{folder:path}", tree),
        Route("/api/models/{user}/{name}/preupload/{revision}", preupload, methods=["POST"]),
        Route("/api/models/{user}/{name}/commit/{revision}", commit, methods=["POST"]),
        Route("/{user}/{name}.git/info/lfs/objects/batch", lfs_batch, methods=["POST"]),
        Route("/lfs/{user}/{name}/{oid}", lfs_put, methods=["PUT"]),
        Route("/{user}/{name}/resolve/{revision}/{path:path}", resolve),
    ]
    app = Starlette(
        routes=routes, exception_handlers={Refused: lambda request, error: error.response}
    )
    app.state.store = store
    return app


def who(request: Request) -> tuple[str, str] | None:
    """The user and role of the request's token; None without a token."""
    header = request.headers.get("authorization")
    if header is None:
        return None
    user = TOKENS.get(header.removeprefix("Bearer "))
    if user is None:
        raise Refused(401, "Invalid credentials in Authorization header")
    return user


def find_repo(request: Request, to_write: bool = False) -> Repo:
    user = who(request)
    repo = request.app.state.store.repos.get("{user}/{name}".format(**request.path_params))
    if repo is None or (repo.private and not may_write(user, repo.name)):
        raise Refused(401 if user is None else 404, "Repository not found", "RepoNotFound")
    if to_write and (user is None or user[1] != "write" or not may_write(user, repo.name)):
        raise Refused(403, "You don't have the rights to write to this repository")
    return repo


def may_write(user: tuple[str, str] | None, repo_id: str) -> bool:
    return user is not None and repo_id.partition("/")[0] in (user[0], "org")


def find_commit(request: Request) -> tuple[Repo, Commit]:
    repo, revision = find_repo(request), request.path_params.get("revision", "main")
    oid = repo.head.oid if revision == "main" else revision
    for commit in repo.commits:
        if commit.oid == oid:
            return repo, commit
    raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def is_lfs(path: str) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in LFS_FILES)


def etag(path: str, content: bytes) -> str:
    """A large file's SHA-256, another file's git hash."""
    if is_lfs(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


async def whoami(request: Request) -> Response:
    user = who(request)
    if user is None:
        raise Refused(401, "Invalid username or password.")
    token = {"displayName": "test", "role": user[1]}
    return JSONResponse(
        {"type": "user", "name": user[0], "orgs": [{"name": "org"}], "auth": {"accessToken": token}}
    )


async def validate_yaml(request: Request) -> Response:
    """Some of the rules that the Hub has for the metadata of a card."""
    text = (await request.json())["content"]
    metadata = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    data = (yaml.safe_load(metadata[1]) if metadata else None) or {}
    errors = [
        *_errors_of_names(data, "base_model"),
        *_errors_of_names(data, "datasets"),
        *_errors_of_choice(data, "license", LICENSES),
        *_errors_of_choice(data, "language", LANGUAGES),
        *_errors_of_results(data),
    ]
    answer = {"errors": [{"message": message} for message in errors], "warnings": []}
    return JSONResponse(answer, 400 if errors else 200)


def _errors_of_names(data: dict[str, Any], key: str) -> Iterator[str]:
    names = data.get(key) or []
    for name in names if isinstance(names, list) else [names]:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)):
            yield f'"{key}" with value "{name}" is not valid.'


def _errors_of_choice(data: dict[str, Any], key: str, choices: set[str]) -> Iterator[str]:
    if key in data and data[key] not in choices:
        yield f'"{key}" must be one of {choices}'


def _errors_of_results(data: dict[str, Any]) -> Iterator[str]:
    for model in data.get("model-index", []):
        for result in model["results"]:
            dataset = result["dataset"]
            texts = [dataset.get(key, "") for key in ("config", "split", "revision")]
            texts += [result.get("task", {}).get("type"), dataset.get("name"), dataset.get("type")]
            if not all(isinstance(text, str) for text in texts):
                yield '"model-index" needs text for task.type and for the fields of dataset'


async def create(request: Request) -> Response:
    user, asked = who(request), await request.json()
    name = f"{asked.get('organization') or (user[0] if user else '')}/{asked['name']}"
    if user is None:
        raise Refused(401, "Invalid username or password.")
    if user[1] != "write" or not may_write(user, name):
        raise Refused(403, f"You don't have the rights to create a model called {name}")
    if re.search(r"admin|\.git$", asked["name"]):
        raise Refused(400, f"Invalid repo name: {asked['name']} is reserved")
    repos = request.app.state.store.repos
    answer = {"url": f"{request.base_url}{name}", "name": name}
    if name in repos:
        return JSONResponse({**answer, "error": "You already created this model repo"}, 409)
    private = asked.get("private") or asked.get("visibility") == "private"
    repos[name] = Repo(name, bool(private))
    repos[name].commit(
        "initial commit", {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
    )
    return JSONResponse(answer)


async def info(request: Request) -> Response:
    repo, commit = find_commit(request)
    siblings = [{"rfilename": path} for path in commit.files]
    facts = {"id": repo.name, "sha": commit.oid, "private": repo.private, "tags": []}
    return JSONResponse({**facts, "siblings": siblings})


async def tree(request: Request) -> Response:
    _, commit = find_commit(request)
    folder = request.path_params.get("folder")
    if folder and not any(path.startswith(f"{folder}/") for path in commit.files):
        raise Refused(404, f"{folder} does not exist", "EntryNotFound")
    entries = []
    for path, content in commit.files.items():
        size, oid = len(content), hashlib.sha1(content).hexdigest()
        entry = {"type": "file", "path": path, "size": size, "oid": oid}
        if is_lfs(path):
            entry["lfs"] = {"oid": etag(path, content), "size": size, "pointerSize": 134}
        entries.append(entry)
    return JSONResponse(entries)


async def preupload(request: Request) -> Response:
    repo = find_repo(request, to_write=True)
    files = []
    for file in (await request.json())["files"]:
        path, stored = file["path"], repo.head.files.get(file["path"])
        entry = {"path": path, "uploadMode": "lfs" if is_lfs(path) else "regular"}
        oid = stored and etag(path, stored)
        files.append({**entry, "shouldIgnore": False, "oid": oid})
    return JSONResponse({"files": files})


async def lfs_batch(request: Request) -> Response:
    repo = find_repo(request, to_write=True)
    stored = request.app.state.store.objects
    objects = []
    for item in (await request.json())["objects"]:
        href = f"{request.base_url}lfs/{repo.name}/{item['oid']}"
        actions = {"upload": {"href": href}}
        objects.append(item | ({} if item["oid"] in stored else {"actions": actions}))
    return JSONResponse({"transfer": "basic", "objects": objects})


async def lfs_put(request: Request) -> Response:
    content = await request.body()
    if hashlib.sha256(content).hexdigest() != request.path_params["oid"]:
        raise Refused(400, "The content does not have the announced hash")
    request.app.state.store.objects[request.path_params["oid"]] = content
    return Response()


async def commit(request: Request) -> Response:
    repo = find_repo(request, to_write=True)
    header, *lines = [json.loads(line) for line in (await request.body()).splitlines()]
    parent = header["value"].get("parentCommit")
    if parent not in (None, repo.head.oid):
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    changes: dict[str, bytes | None] = {}
    for line in lines:
        value = line["value"]
        if line["key"] == "file":
            changes[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "deletedFile":
            changes[value["path"]] = None
        elif line["key"] == "lfsFile" and value["oid"] in request.app.state.store.objects:
            changes[value["path"]] = request.app.state.store.objects[value["oid"]]
        else:
            raise Refused(400, f"{line['key']} of {value['path']} is not possible")
    oid = repo.commit(header["value"]["summary"], changes).oid
    url = f"{request.base_url}{repo.name}/commit/{oid}"
    return JSONResponse({"success": True, "commitOid": oid, "commitUrl": url})


async def resolve(request: Request) -> Response:
    _, commit = find_commit(request)
    path = request.path_params["path"]
    if path not in commit.files:
        refused = Refused(404, f"{path} does not exist", "EntryNotFound").response
        refused.headers["X-Repo-Commit"] = commit.oid
        return refused
    content = commit.files[path]
    headers = {"ETag": f'"{etag(path, content)}"', "X-Repo-Commit": commit.oid}
    return Response(content, headers=headers, media_type="application/octet-stream")
