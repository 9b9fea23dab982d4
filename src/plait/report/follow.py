"""The page of a run that trains, served on this machine's loopback, and updated. It ends with the run, or on Ctrl-C.

Nobody else reaches it: it listens on 127.0.0.1, answers two paths, and to no other name (`Host`) than its own.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from plait.report.figures import Figures
from plait.report.page import page

PAUSE, GRACE = 2.0, 10.0
"""Seconds between two looks at the run's files, and how long the last page is served after the run has ended."""


class FollowedPage:
    """The newest page and its version. Threads that serve it read both."""

    def __init__(self) -> None:
        self.version, self.text = "", b""

    def show(self, shown: Figures) -> None:
        """Make the page of these figures, unless it is that already."""
        version = hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]
        if version != self.version:
            self.text, self.version = page(shown, version).encode(), version


def follow(make: Callable[[], Figures], is_running: Callable[[], bool], say: Callable[[str], None], port: int = 0) -> None:
    """Serve the page that `make` gives the figures of, until the run has ended. `say` gets the address. Port 0 is any free one."""
    served = FollowedPage()
    served.show(make())
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(served))
    server.daemon_threads = True
    address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="report", daemon=True)
    thread.start()
    try:
        say(f"http://{address}/")
        ended = 0.0
        while not ended or time.monotonic() < ended + GRACE:
            if not ended and not is_running():
                ended = time.monotonic()
            served.show(make())
            time.sleep(PAUSE)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(served: FollowedPage) -> type[BaseHTTPRequestHandler]:
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
            """Requests are not printed."""

    return Handler
