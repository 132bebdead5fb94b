"""ipyparallel's nanny of an engine, as a fork of it.

The nanny tells the controller at once that its engine's process has ended. ipyparallel starts it by a command, and the
engine waits while it imports everything again: a third of a second of a core. A fork has it all.
"""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from contextlib import suppress
from typing import IO, Any

import speedlab.cluster.processes as processes


def fork() -> None:
    """Fork the nanny of this process, which is going to be an engine and has no threads yet."""
    import ipyparallel.engine.app as app

    (orders, to_nanny), (answers, from_nanny) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(to_nanny)
        os.close(answers)
        try:
            _serve(orders, from_nanny)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # What is to be done at the engine's end is not done here.
    os.close(orders)
    os.close(from_nanny)

    def start_nanny(**about: Any) -> tuple[str, IO[str]]:
        with suppress(BrokenPipeError), os.fdopen(to_nanny, "wb") as order:  # It may have ended.
            pickle.dump({**about, "pid": os.getpid()}, order)
        answer = os.fdopen(answers)
        if not (url := answer.readline().strip()):
            raise RuntimeError("the nanny of this engine has ended; this log says why")
        return url, answer  # Kept as long as the engine lives: the nanny notices when it is closed.

    app.start_nanny = start_nanny


def _serve(orders: int, answers: int) -> None:
    """Wait until the engine has an id, then be its nanny; end with it."""
    from ipyparallel.engine.nanny import KernelNanny

    processes.name_nanny()
    os.setsid()  # Engines are known by their own sessions and names: in this order it is none at any time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(orders, "rb") as order:
        about = order.read()
    if about:  # Otherwise the engine has ended before it had one.
        KernelNanny.main(**pickle.loads(about), pipe=os.fdopen(answers, "w", buffering=1))
