"""The monitor as a page on this machine: read-only, behind a token, for 127.0.0.1 alone. No torch here.

Refuses other hosts' names (DNS rebinding), requests without the token, and every method but GET and HEAD.
The page gets data as JSON and sets text only: nothing that a run is called can become markup.
"""

from __future__ import annotations

import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from oelm.errors import MachineError
from oelm.study.watch import Watcher


class Monitor:
    """A server of snapshots; `serve` blocks until interrupted."""

    def __init__(self, runs: Path, study: str | None = None, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._watcher = Watcher(runs, study)
        self._lock = threading.Lock()  # one look at the files at a time, however many pages are open
        try:
            self.server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        except OSError as error:
            raise MachineError(
                f"--port {port}: cannot be used ({error.strerror}); choose another, or 0 for a free one"
            ) from None
        self.server.daemon_threads = True
        self.port = int(self.server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return self._watcher.snapshot(curves=True)

    def serve(self) -> None:
        """Answer until `close` or an interrupt."""
        self.server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _handler(monitor: Monitor) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "oelm"
        sys_version = ""
        timeout = 20

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the address holds the token."""

        def _answer(self, *, body: bool) -> None:
            nonce = secrets.token_urlsafe(12)
            status, kind, content = self._content(nonce)
            policy = (
                "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            # style attributes are set by script through the CSSOM, which the policy allows; markup may not
            self.send_header(
                "Content-Security-Policy", f"{policy}; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
            )
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _content(self, nonce: str) -> tuple[int, str, bytes]:
            if self.headers.get("Host") not in (f"127.0.0.1:{monitor.port}", f"localhost:{monitor.port}"):
                return 421, "text/plain", b"this monitor answers for 127.0.0.1 only\n"
            parts = urlsplit(self.path)
            given = parse_qs(parts.query).get("token", [""])[0]
            if not secrets.compare_digest(given.encode(), monitor.token.encode()):
                return 403, "text/plain", b"the token is missing or wrong; use the address that oelm monitor printed\n"
            if parts.path == "/":
                page = resources.files("oelm.study").joinpath("page.html").read_text(encoding="utf-8")
                return 200, "text/html", page.replace("@NONCE@", nonce).encode()
            if parts.path == "/data.json":
                return 200, "application/json", json.dumps(monitor.snapshot(), allow_nan=False).encode()
            return 404, "text/plain", b"no such page\n"

    return Handler
