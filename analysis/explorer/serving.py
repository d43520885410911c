"""The explorer's page from this machine's own web server, for the time that somebody looks at it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sp_bench.analysis.explorer.details import as_text, drawn, of_point
from sp_bench.analysis.explorer.page import served
from sp_bench.errors import RequestError
from sp_bench.records import Record

PORT = 8765
HOST = "127.0.0.1"
Find = Callable[[], Mapping[Path, Record]]


class Server(ThreadingHTTPServer):
    """A server of one page and its points. The page reads the records again whenever it is asked for."""

    daemon_threads = True

    def __init__(self, find: Find, title: str, port: int, own: Path | None = None) -> None:
        self.find, self.title, self.own, self.lock = find, title, own, threading.Lock()
        self.by_id: dict[str, tuple[Path, Record]] = {}
        super().__init__((HOST, port), Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def page(self) -> str:
        """The page of the records that are there now."""
        with self.lock:
            records = self.find()
            self.by_id = {record.run_id: (path, record) for path, record in records.items()}
            return served(records, self.title)

    def point(self, run_id: str) -> str | None:
        """A point as JSON; None if there is none with this run_id."""
        with self.lock:
            if run_id not in self.by_id:
                return None
            path, record = self.by_id[run_id]
            return as_text(of_point(record, path, private=True, own=self.own) | drawn(record, path))


class Handler(BaseHTTPRequestHandler):
    """Answers / and /points/<run_id>."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:  # another site's page, by a name that leads here
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"the page is at {self.server.address}")
        path = self.path.partition("?")[0]
        try:
            if path == "/":
                return self._answer(HTTPStatus.OK, "text/html", self.server.page())
            if details := self.server.point(path.removeprefix("/points/")):
                return self._answer(HTTPStatus.OK, "application/json", details)
        except RequestError as error:
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", str(error))
        return self._answer(HTTPStatus.NOT_FOUND, "application/json", json.dumps({"error": f"{path} is not here"}))

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each request."""


def serve(find: Find, title: str, port: int, own: Path | None = None) -> int:
    """Serve the page until the process is interrupted. Raises RequestError for no records, or a port that is taken.

    `own` is the folder of --config-dir (details.of_point).
    """
    find()
    try:
        server = Server(find, title, port, own)
    except OSError as error:
        raise RequestError(
            f"port={port}", f"can't be used ({error.strerror})", "port=0, any free one, would work"
        ) from None
    with server:
        forward = f"{server.server_port}:{HOST}:{server.server_port}"
        print(f"{server.address}  (Ctrl-C ends it; from elsewhere: ssh -L {forward} THIS_MACHINE)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
