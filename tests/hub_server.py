"""A local Hub: what huggingface_hub needs of it to read a repository, and to open a pull request, over HTTP.

It keeps every commit, records every request, and can fail on purpose: `faults` maps a part of a path to a status, or to "drop",
which closes the connection after the request was read.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class LocalHub(ThreadingHTTPServer):
    """Repositories by id and reference ("main", "refs/pr/1", a hash), each a dictionary from file names to bytes."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.references, self.requests, self.faults, self.headers, self.uploaded = {}, [], {}, [], {}
        self.token = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def put(self, repo_id, files, reference="main"):
        """Make `reference` the commit with these files; return its hash."""
        content = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())})
        commit = hashlib.sha1(f"{repo_id} {content}".encode()).hexdigest()
        self.references.setdefault(repo_id, {}).update({reference: (commit, files), commit: (commit, files)})
        return commit

    def files(self, repo_id, reference="main"):
        return self.references[repo_id][reference][1]

    def known(self):
        """SHA-256 of all content: the Hub asks only for large files that it lacks."""
        commits = [files for references in self.references.values() for _, files in references.values()]
        return {hashlib.sha256(data).hexdigest() for files in commits for data in files.values()}

    def sent(self, word):
        """Bodies of the requests whose path contains `word`."""
        return [body for method, path, body in self.requests if word in path and method in ("POST", "PUT")]

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

    def handle_request(self):
        hub = self.server
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(chunks)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append((self.command, self.path, body))
        hub.headers.append(dict(self.headers))
        for word, fault in hub.faults.items():
            if word in f"{self.command} {self.path}":
                if fault == "drop":
                    self.close_connection = True
                    self.connection.close()
                    return
                return self.answer({"error": f"refused with {fault}"}, fault)
        path = unquote(urlsplit(self.path).path).strip("/")
        if "/resolve/" in path:
            return self.resolve(*path.split("/resolve/"))
        if path.startswith("api/models/"):
            return self.model(path.split("/")[2:], body)
        if path == "api/repos/create":
            wanted = json.loads(body)
            repo_id = f"{wanted['organization']}/{wanted['name']}"
            if repo_id in hub.references:
                return self.answer({"url": f"{hub.endpoint}/{repo_id}", "error": "You already created this repo"}, 409)
            hub.put(repo_id, {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
            return self.answer({"url": f"{hub.endpoint}/{repo_id}", "id": repo_id})
        if path == "api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path.endswith("info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for item in objects:
                if item["oid"] not in hub.known():
                    item["actions"] = {"upload": {"href": f"{hub.endpoint}/lfs/{item['oid']}"}}
            return self.answer({"transfer": "basic", "objects": objects})
        if path.startswith("lfs/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("lfs/")
            hub.uploaded[path.removeprefix("lfs/")] = body
            return self.answer({})
        self.missing("EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def find(self, repo_id, reference):
        """The commit and the files of a reference; None after an answer that it does not exist."""
        references = self.server.references.get(repo_id)
        if references is None:
            return self.missing("RepoNotFound")
        return references.get(reference) or self.missing("RevisionNotFound")

    def model(self, parts, body):
        repo_id, action, reference = "/".join(parts[:2]), *(parts[2:3] or ["revision"]), "/".join(parts[3:]) or "main"
        query = parse_qs(urlsplit(self.path).query)
        if action == "tree":
            known = self.server.references.get(repo_id, {})
            if any(reference.startswith(f"{name}/") for name in known):  # of a subfolder; there are none
                return self.missing("EntryNotFound")
        if action not in ("revision", "tree", "preupload", "commit"):
            return self.missing("EntryNotFound")
        if not (found := self.find(repo_id, reference)):
            return None
        commit, files = found
        if action == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": oid(file["path"], files),
                }
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": modes})
        if action == "commit":
            if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
                return self.missing("Unauthorized", 401)
            return self.commit(repo_id, files, [json.loads(line) for line in body.splitlines()], query)
        entries = []
        for name, data in sorted(files.items()):
            entry = {"type": "file", "path": name, "oid": blob(data), "size": len(data)}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        if action == "tree":
            return self.answer(entries)
        siblings = [
            {
                "rfilename": entry["path"],
                "size": entry["size"],
                "blobId": entry["oid"],
                **({"lfs": {**entry["lfs"], "sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {}),
            }
            for entry in entries
        ]
        self.answer(
            {"id": repo_id, "modelId": repo_id, "sha": commit, "private": False, "siblings": siblings, "tags": []}
        )

    def commit(self, repo_id, files, lines, query):
        files = dict(files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        assert query["create_pr"] == ["1"]
        number = 1 + sum(name.startswith("refs/pr/") for name in self.server.references[repo_id])
        commit = self.server.put(repo_id, files, f"refs/pr/{number}")
        url = f"{self.server.endpoint}/{repo_id}"
        self.answer(
            {
                "success": True,
                "commitOid": commit,
                "commitUrl": f"{url}/commit/{commit}",
                "hookOutput": "",
                "pullRequestUrl": f"{url}/discussions/{number}",
            }
        )

    def resolve(self, repo_id, path):
        references = self.server.references.get(repo_id)
        if references is None:
            return self.missing("RepoNotFound")
        reference = next((name for name in references if path.startswith(f"{name}/")), None)
        if reference is None:
            return self.missing("RevisionNotFound")
        commit, files = references[reference]
        data = files.get(path.removeprefix(f"{reference}/"))
        if data is None:
            return self.missing("EntryNotFound")
        self.answer(body=data, X_Repo_Commit=commit, ETag=f'"{hashlib.sha256(data).hexdigest()}"')


def oid(name, files):
    """The hash by which huggingface_hub knows that a file has not changed."""
    if name not in files:
        return None
    return hashlib.sha256(files[name]).hexdigest() if name.endswith(".safetensors") else blob(files[name])


def blob(data):
    """The hash of git for the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
