"""A web server of our own that somebody is told of alerts by: it keeps what it gets, and answers as it is told to."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HookServer:
    """Listens on this machine while a test runs."""

    def __init__(self, status: int = 200, *, hangs: bool = False, location: str | None = None) -> None:
        self.got: list[dict[str, Any]] = []  # the documents
        self.calls: list[tuple[str, str, str | None]] = []  # method, path, type of content
        self._status, self._hangs, self._location = status, hangs, location
        self._let_go = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> HookServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.calls.append((self.command, self.path, self.headers["Content-Type"]))
                server.got.append(json.loads(body))
                if server._hangs:
                    server._let_go.wait()
                    return
                self.send_response(server._status)
                if server._location is not None:
                    self.send_header("Location", server._location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                server.calls.append((self.command, self.path, None))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Keep the test's own output clean."""

        return Handler


class DrippingServer:
    """Answers one letter of a header at a time, for as long as anybody listens."""

    def __init__(self) -> None:
        self.calls = 0
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> DrippingServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        open_ones: list[socket.socket] = []
        while not self._over.wait(0.05):
            try:
                open_ones.append(self._listener.accept()[0])
                self.calls += 1
                open_ones[-1].sendall(b"HTTP/1.1 200 OK\r\nX: ")
            except TimeoutError:
                pass
            for one in open_ones:
                one.sendall(b"x")
        for one in open_ones:
            one.close()
