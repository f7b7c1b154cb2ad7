"""A small Hugging Face hub over HTTP: the calls by which `huggingface_hub` and `datasets` fetch a repository."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[str]:
    """Serve folders as repositories: "models/OWNER/NAME" or "datasets/OWNER/NAME" -> folder. Yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._answer(body=True, paths=parse_qs(text).get("paths") or json.loads(text or "{}").get("paths", []))

        def _answer(self, *, body: bool, paths: list[str] | None = None) -> None:
            path = unquote(urlsplit(self.path).path)
            api = path.startswith("/api/")
            path = path.removeprefix("/api").strip("/")
            path = path if path.startswith(("models/", "datasets/")) else f"models/{path}"
            name = next((name for name in repositories if f"{path}/".startswith(f"{name}/")), None)
            if name is None:
                return self._send(404, b"", body, {"X-Error-Code": "RepoNotFound"})
            folder, rest = repositories[name], path.removeprefix(name).strip("/").split("/")
            files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
            if api:
                answer: object = {"id": name.partition("/")[2], "sha": COMMIT, "private": False, "tags": []}
                if rest[0] in ("tree", "paths-info"):
                    below = "/".join(rest[2:])
                    chosen = files if paths is None else paths
                    chosen = [file for file in files if file in chosen and file.startswith(below)]
                    answer = [_entry(folder, file) for file in chosen]
                elif rest[0] in ("", "revision"):
                    answer |= {"siblings": [{"rfilename": file} for file in files]}  # type: ignore[operator]
                return self._send(200, json.dumps(answer).encode(), body, {"Content-Type": "application/json"})
            file = "/".join(rest[2:])
            if file not in files:
                return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            data = (folder / file).read_bytes()
            return self._send(200, data, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

        def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _entry(folder: Path, file: str) -> dict[str, object]:
    data = (folder / file).read_bytes()
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
