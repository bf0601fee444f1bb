"""A schema registry for tests: answers requests for schemas by their id, as Confluent's does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def schema_registry(schemas: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Serve schemas by their id, and yield the address. Other ids are not known. Id 500 is an error of the registry."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            schema_id = int(self.path.partition("/schemas/ids/")[2].partition("?")[0])
            if schema_id in schemas:
                self._answer(200, {"schema": json.dumps(schemas[schema_id])})
            elif schema_id == 500:
                self._answer(500, {"error_code": 50001, "message": "the store is away"})
            else:
                self._answer(404, {"error_code": 40403, "message": f"Schema {schema_id} not found"})

        def _answer(self, status: int, content: Mapping[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
