"""`python -m tests.benchmarks page`: when a Jupyter server is there."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speedlab.config import ConfigError
from tests.benchmarks import page


def test_a_server_that_says_where_it_will_listen_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
    info = tmp_path / f"jpserver-{process.pid}.json"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        # What happens while it waits, in this order; once more, and it has waited too long.
        steps = iter(
            [
                lambda: info.write_text(""),
                lambda: info.write_text(json.dumps({"port": port})),
                found.listen,
            ]
        )
        monkeypatch.setattr(page, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: next(steps)()))
        assert page.listening_port(process, tmp_path) == port
        assert list(steps) == []
    process.poll = lambda: 1
    with pytest.raises(ConfigError, match="did not start; try `jupyter server` by hand"):
        page.listening_port(process, tmp_path)
