"""Serve the page of a running training on this machine's loopback, with updates. It ends with the run, or on Ctrl-C.

Only this machine can connect: the server listens on 127.0.0.1, answers two paths, and rejects other host names (`Host`).
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from plait.report.figures import Figures
from plait.report.page import render_page

POLL_SECONDS, GRACE_SECONDS = 2.0, 10.0
"""Seconds between two reads of the run's files, and seconds to serve the last page after the end of the run."""


class FollowedPage:
    """The newest page and its version, read by server threads."""

    def __init__(self) -> None:
        self.version, self.text = "", b""

    def update(self, shown: Figures) -> None:
        """Render the page of new figures, if they changed."""
        version = hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]
        if version != self.version:
            self.text, self.version = render_page(shown, version).encode(), version


def follow_run(make: Callable[[], Figures], is_running: Callable[[], bool], say: Callable[[str], None], port: int = 0) -> None:
    """Serve the page of the figures from `make` until the run ends. `say` receives the address. Port 0 selects a free one."""
    served = FollowedPage()
    served.update(make())
    server = ThreadingHTTPServer(("127.0.0.1", port), _make_handler(served))
    server.daemon_threads = True
    address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="report", daemon=True)
    thread.start()
    try:
        say(f"http://{address}/")
        ended = 0.0
        while not ended or time.monotonic() < ended + GRACE_SECONDS:
            if not ended and not is_running():
                ended = time.monotonic()
            served.update(make())
            time.sleep(POLL_SECONDS)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _make_handler(served: FollowedPage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
                self.send_error(403)
                return
            found = {"/": ("text/html; charset=utf-8", served.text), "/version": ("text/plain", served.version.encode())}.get(self.path)
            if found is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", found[0])
            self.send_header("Content-Length", str(len(found[1])))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(found[1])

        def log_message(self, format: str, *args: object) -> None:
            """Suppress the log of requests."""

    return Handler
