"""How the tests of this tier ask their Jupyter server."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import websocket

TOKEN = "a-token-of-the-tests"
SECONDS = 30.0


@dataclass
class JupyterServer:
    """Where it is, and how it is asked."""

    process: subprocess.Popen[bytes]
    port: int
    root: Path
    ipython: Path

    @property
    def clusters(self) -> Path:
        """The folder of all clusters."""
        return self.ipython / "profile_default" / "speedlab"

    def ask(
        self, way: str, body: Any = None, *, headers: dict[str, str] | None = None, token: str = TOKEN
    ) -> tuple[int, Any]:
        """(status, answer): a POST when there is a body."""
        given = ({"Authorization": f"token {token}"} if token else {}) | (headers or {})
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)) as connection:
            connection.request("GET" if body is None else "POST", f"/base/speedlab/api/{way}", data, given)
            answer = connection.getresponse()
            text = answer.read()
        assert answer.headers.get_content_type() == "application/json", text
        return answer.status, json.loads(text)

    def live(self, token: str = TOKEN, *, way: str = "live", **options: Any) -> websocket.WebSocket:
        """A page's websocket."""
        url = f"ws://127.0.0.1:{self.port}/base/speedlab/api/{way}" + (f"?token={token}" if token else "")
        return websocket.create_connection(url, timeout=SECONDS, **options)
