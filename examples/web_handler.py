"""Answer a web request at once when its resource is in use.

The server runs one export at a time, over all its threads, processes and hosts. A request that
finds an export under way is answered with 409. The program sends two requests to its own server.
"""

from __future__ import annotations

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

from tenure import blocking

STORE = os.environ.get("TENURE_URL", "sqlite:///examples.db")


def handler_for(client: blocking.Client) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            lease = client.mutex("export").try_lock()
            if lease is None:
                self.reply(409, "an export is under way")
                return
            with lease:
                self.reply(200, "exported")

        def reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    return Handler


def ask(server: ThreadingHTTPServer) -> str:
    try:
        with urlopen(f"http://127.0.0.1:{server.server_port}/export") as answer:
            return f"{answer.status} {answer.read().decode()}"
    except HTTPError as error:
        with error:
            return f"{error.code} {error.read().decode()}"


def main() -> None:
    with (
        blocking.connect(STORE) as client,
        ThreadingHTTPServer(("127.0.0.1", 0), handler_for(client)) as server,
    ):
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            with client.mutex("export").lock():  # as another worker does
                print(ask(server))
            print(ask(server))
        finally:
            server.shutdown()
            serving.join()


if __name__ == "__main__":
    main()
