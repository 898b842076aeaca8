"""A web server for tests that fetch."""

from __future__ import annotations

import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gradmem.data.fetch import Mirror


class Web:
    """A web server whose folders are dictionaries: {folder: {file: content}}."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, bytes]] = {}
        self.asked: Counter[str] = Counter()
        self.delay = 0.0
        self.cut = 0  # bytes of the body that are promised but not sent
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked[self.path] += 1
                time.sleep(web.delay)
                _, folder, name = self.path.split("/")
                content = web.folders.get(folder, {}).get(name.removesuffix(".gz"))
                if content is None:
                    return self.send_error(404)
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) - web.cut])

            def log_message(self, *_) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def mirror(self, folder: str, contents: dict[str, bytes], suffix: str = ".gz") -> Mirror:
        self.folders[folder] = contents
        return Mirror(f"http://127.0.0.1:{self.server.server_port}/{folder}/", suffix)

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
