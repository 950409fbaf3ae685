"""A local Hub: what huggingface_hub needs of it to read a repository, and to open a pull request, over HTTP.

It keeps every commit and records every request. All files are sent inside the commit, as the Hub answers for small ones.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class LocalHub(ThreadingHTTPServer):
    """Repositories by id and reference ("main", "refs/pr/1", a hash), each a commit and a dictionary from names to bytes."""

    daemon_threads = True

    def __init__(self, token):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint, self.token = f"http://127.0.0.1:{self.server_port}", token
        self.references, self.requests = {}, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def put(self, repo_id, files, reference="main"):
        commit = hashlib.sha1(repr((repo_id, sorted(files.items()))).encode()).hexdigest()
        self.references.setdefault(repo_id, {}).update({reference: (commit, files), commit: (commit, files)})
        return commit

    def files(self, repo_id, reference="main"):
        return self.references[repo_id][reference][1]

    def sent(self, word):
        return [body for method, path, body in self.requests if word in path and method == "POST"]

    def handle_error(self, request, client_address):
        """A client that closes the connection is no error here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, content=None, status=200, body=None, **headers):
        body = json.dumps(content).encode() if body is None else body
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code, status=404):
        self.answer({"error": code}, status, X_Error_Code=code, X_Error_Message=f"{code} for {self.path}")

    def read_body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def handle_request(self):
        hub, body = self.server, self.read_body()
        hub.requests.append((self.command, self.path, body))
        path = unquote(urlsplit(self.path).path).strip("/")
        if path == "api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "api/repos/create":
            wanted = json.loads(body)
            repo_id = f"{wanted['organization']}/{wanted['name']}"
            status = 409 if repo_id in hub.references else 200
            if status == 200:
                hub.put(repo_id, {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
            return self.answer({"url": f"{hub.endpoint}/{repo_id}", "id": repo_id}, status)
        if "/resolve/" in path:
            repo_id, rest = path.split("/resolve/")
        elif path.startswith("api/models/"):
            *name, rest = path.removeprefix("api/models/").split("/", 2)
            repo_id, rest = ("/".join(name), rest) if len(name) == 2 else (f"{name[0]}/{rest}", "")
        else:
            return self.missing("EntryNotFound")
        if repo_id not in hub.references:
            return self.missing("RepoNotFound")
        if "/resolve/" in path:
            return self.resolve(repo_id, rest)
        action, _, reference = rest.partition("/")
        found = hub.references[repo_id].get(reference or "main")
        if found is None:  # a tree may also be that of a subfolder; there are none
            return self.missing("EntryNotFound" if action == "tree" else "RevisionNotFound")
        return {"preupload": self.preupload, "commit": self.commit}.get(action, self.describe)(repo_id, found, body)

    do_GET = do_HEAD = do_POST = handle_request

    def describe(self, repo_id, found, body):
        commit, files = found
        entries = [{"type": "file", "path": name, "oid": oid(files[name]), "size": len(files[name])} for name in files]
        if "/tree/" in self.path:
            return self.answer(entries)
        siblings = [{"rfilename": name, "size": len(files[name]), "blobId": oid(files[name])} for name in files]
        names = {"id": repo_id, "modelId": repo_id, "sha": commit}
        self.answer({**names, "private": False, "siblings": siblings, "tags": []})

    def preupload(self, repo_id, found, body):
        names = [file["path"] for file in json.loads(body)["files"]]
        known = {name: oid(found[1][name]) if name in found[1] else None for name in names}
        mode = {"uploadMode": "regular", "shouldIgnore": False}
        self.answer({"files": [{"path": name, "oid": known[name], **mode} for name in names]})

    def commit(self, repo_id, found, body):
        hub, files = self.server, dict(found[1])
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.missing("Unauthorized", 401)
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        assert parse_qs(urlsplit(self.path).query)["create_pr"] == ["1"]
        number = 1 + sum(name.startswith("refs/pr/") for name in hub.references[repo_id])
        commit, url = hub.put(repo_id, files, f"refs/pr/{number}"), f"{hub.endpoint}/{repo_id}"
        answer = {"success": True, "commitOid": commit, "commitUrl": f"{url}/commit/{commit}", "hookOutput": ""}
        self.answer(answer | {"pullRequestUrl": f"{url}/discussions/{number}"})

    def resolve(self, repo_id, path):
        references = self.server.references[repo_id]
        reference = next((name for name in references if path.startswith(f"{name}/")), None)
        if reference is None:
            return self.missing("RevisionNotFound")
        commit, files = references[reference]
        data = files.get(path.removeprefix(f"{reference}/"))
        if data is None:
            return self.missing("EntryNotFound")
        self.answer(body=data, X_Repo_Commit=commit, ETag=f'"{hashlib.sha256(data).hexdigest()}"')


def oid(data):
    """The hash of git for the content of a file, by which huggingface_hub knows that it has not changed."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
