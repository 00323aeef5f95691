"""A metadata service, as clouds have one for each of their machines."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from peer.options.values import HostPort

Answer = Callable[[str, str, dict[str, str]], tuple[int, bytes]]


@contextmanager
def metadata_service(answer: Answer) -> Iterator[HostPort]:
    """A server that answers by method, path and headers (names in lower case)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, body = answer(self.command, self.path, headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield HostPort("127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
