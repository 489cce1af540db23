"""A hub on this machine that speaks as much of the Hugging Face API as is asked of it."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODEL = "someone/tiny"
COMMIT = "c0ffee" * 6 + "c0ff"


class Hub(http.server.ThreadingHTTPServer):
    """Serves one model. `sent` counts the bytes that left by file; `cuts` says after how many one breaks off, once.

    `num_busy` requests for files are answered by status 429. One that `ignores_ranges` gives whole files.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.directory = directory
        self.sent: Counter[str] = Counter()
        self.asked: list[tuple[str, str | None]] = []
        self.cuts: dict[str, int] = {}
        self.vanished: set[str] = set()
        self.num_busy = 0
        self.ignores_ranges = False
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


class Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in {f"/api/models/{MODEL}/revision/{revision}" for revision in ("main", COMMIT)}:
            self._send(json.dumps(self._info()).encode())
            return
        name = path.rpartition("/")[2]
        file = self.server.directory / name
        if f"/{MODEL}/resolve/{COMMIT}/" not in path or name in self.server.vanished or not file.is_file():
            what = "EntryNotFound" if MODEL in path else "RepoNotFound"
            self.send_response(404)
            self.send_header("X-Error-Code", what)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wanted = self.headers.get("Range")
        self.server.asked.append((name, wanted))
        if self.server.num_busy:
            self.server.num_busy -= 1
            self.send_response(429)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send(file.read_bytes(), None if self.server.ignores_ranges else wanted, name)

    def _send(self, data: bytes, wanted: str | None = None, name: str = "") -> None:
        size = len(data)
        self.send_response(206 if wanted else 200)
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1 if last else None]
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if name in self.server.cuts and (not wanted or wanted.endswith("-")):
            data = data[: self.server.cuts.pop(name)]
            self.close_connection = True
        self.server.sent[name] += len(data)  # before the caller can know that all is there
        self.wfile.write(data)

    def _info(self) -> dict[str, Any]:
        files = [
            {
                "rfilename": path.name,
                "size": path.stat().st_size,
                "blobId": "0",
                **(
                    {"lfs": {"size": 1, "sha256": digest(path), "pointerSize": 1}}
                    if path.suffix == ".safetensors"
                    else {}
                ),
            }
            for path in sorted(self.server.directory.iterdir())
        ]
        return {"id": MODEL, "sha": COMMIT, "siblings": files, "tags": []}

    def log_message(self, *_arguments: Any) -> None:
        pass


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def local_hub(model_dir: Path, directory: Path) -> Iterator[Hub]:
    """Serves a copy of `model_dir`, which is made in `directory`."""
    shutil.copytree(model_dir, directory)
    hub = Hub(directory)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
