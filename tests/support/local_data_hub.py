"""A hub on this machine with one data set and one tokenizer: as much of the Hugging Face API as `datasets` and
`huggingface_hub` ask for."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DATA_SET = "someone/books"
TOKENIZER = "someone/words"
COMMIT = "c0ffee" * 6 + "c0ff"


class DataHub(http.server.ThreadingHTTPServer):
    """Serves the files of `folder/datasets` and `folder/models`. `asked` are the paths, in order. Once `falls_silent`,
    it sends half of the next file, and then nothing of any."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder = folder
        self.asked: list[str] = []
        self.falls_silent = False
        self.fell_silent = threading.Event()
        self.closing = threading.Event()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(http.server.BaseHTTPRequestHandler):
    server: DataHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes = b"") -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        data_set, tokenizer = ("datasets", DATA_SET, f"/datasets/{DATA_SET}"), ("models", TOKENIZER, f"/{TOKENIZER}")
        for kind, repo_id, prefix in (data_set, tokenizer):
            folder = self.server.folder / kind
            if path.startswith(f"/api/{kind}/{repo_id}"):
                self._describe(path.removeprefix(f"/api/{kind}/{repo_id}"), repo_id, folder, body)
                return
            for revision in ("main", COMMIT):
                if path.startswith(start := f"{prefix}/resolve/{revision}/"):
                    self._send_file(folder / path.removeprefix(start))
                    return
        self._refuse("RepoNotFound")

    def _describe(self, rest: str, repo_id: str, folder: Path, body: bytes) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        entries = [_entry(path, folder) for path in files]
        if rest in {"", "/revision/main", f"/revision/{COMMIT}"}:
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            self._send_json({"id": repo_id, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
        elif rest.startswith("/revision/"):
            self._refuse("RevisionNotFound")
        elif rest.startswith(f"/paths-info/{COMMIT}"):
            wanted = json.loads(body)["paths"]
            self._send_json([entry for entry in entries if entry["path"] in wanted])
        elif rest.startswith(f"/tree/{COMMIT}"):
            self._send_json(entries if rest.strip("/") == f"tree/{COMMIT}" else [])
        else:
            self._refuse("EntryNotFound")

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._refuse("EntryNotFound")
            return
        data = path.read_bytes()
        self._send(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _send_json(self, value: Any) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and self.server.falls_silent and "ETag" in headers:
            if not self.server.fell_silent.is_set():
                self.server.fell_silent.set()
                self.wfile.write(data[: len(data) // 2])
            self.server.closing.wait()
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, what: str) -> None:
        self._send(b"", {"X-Error-Code": what}, status=404)

    def log_message(self, *_arguments: Any) -> None:
        pass


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {
        "type": "file",
        "path": path.relative_to(folder).as_posix(),
        "size": len(data),
        "oid": hashlib.sha1(data).hexdigest(),
    }


@contextmanager
def local_data_hub(folder: Path) -> Iterator[DataHub]:
    hub = DataHub(folder)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.shutdown()
        hub.server_close()
        thread.join()
