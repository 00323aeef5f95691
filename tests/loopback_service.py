"""A service on the loopback address that takes messages, as ntfy does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


class Service(HTTPServer):
    """It answers with these, then with 200; `got` holds paths, and bodies that were taken."""

    def __init__(self, *answers: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.got: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/secret-topic"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        status = self.server.answers.pop(0) if self.server.answers else 200
        self.server.got.append((self.path, body if status == 200 else str(status)))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"{self.server.url}-elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def open_service(*answers: int) -> Iterator[Service]:
    with Service(*answers) as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()
