"""Process of the fork server: `python -m speedlab.cluster.worker.fork_server DESCRIPTOR`, started by
`fork_server_client.py`.

1. Import torch and the engine, and write a line to the pipe DESCRIPTOR. The process starts no thread, uses no device
   and joins no process group, because a fork would break these.
2. For each line of stdin, an order as JSON, fork an engine. Answer with its process id, or the error. On request,
   answer with the exit statuses of ended engines. An answer has the number of its order.
3. End when stdin is closed, because the parent has ended. Engines continue.

The nanny of an engine is forked, too. A nanny reports the end of its engine's process to the controller at once.
ipyparallel starts it as a command, and the engine waits while it imports everything again: a third of a second of a
core.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from typing import IO, Any

import speedlab.cluster.files.processes as processes
import speedlab.cluster.worker.process as engine_process
import speedlab.cluster.worker.remote as remote


def main() -> None:
    """Fork engines until stdin is closed."""
    processes.name_fork_server()
    answers = int(sys.argv[1])
    # Programs that an engine executes must not hold the pipe open.
    os.set_inheritable(answers, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    remote.preload()
    _import_the_rest()
    # Collect first, so that no garbage is frozen.
    gc.collect()
    gc.freeze()  # The collector does not touch frozen objects, so their memory stays shared with the engines.
    ended: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda number, frame: _take_off_the_list(ended))
    _answer(answers, {"ready": True})
    for line in sys.stdin.buffer:
        order = json.loads(line)
        number = {"number": order["number"]}
        if "ended" in order:
            _take_off_the_list(ended)  # SIGCHLD of an engine that has just ended may not have arrived.
            _answer(answers, {**number, "ended": dict(list(ended.items()))})
            continue
        log = -1
        try:
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            pid = os.fork()
        except OSError as error:
            if log >= 0:
                os.close(log)
            _answer(answers, {**number, "problem": f"{error.filename or 'fork'}: {error.strerror}"})
            continue
        if pid == 0:
            os.close(answers)
            _become_an_engine(order, log)
            return  # The engine has ended: do not read orders in the fork.
        os.close(log)
        _answer(answers, {**number, "pid": pid})


def _answer(answers: int, answer: dict[str, Any]) -> None:
    os.write(answers, json.dumps(answer).encode() + b"\n")


def _import_the_rest() -> None:
    """Import what every engine needs before it is ready."""
    import ipyparallel.engine.app
    import ipyparallel.engine.kernel
    import ipyparallel.engine.nanny

    assert ipyparallel.engine.app
    assert ipyparallel.engine.kernel
    assert ipyparallel.engine.nanny


def _become_an_engine(order: dict[str, Any], log: int) -> None:
    """Set up the fork like a separate process with this environment, these arguments and this log; run the engine."""
    processes.name_engine(int(order["environment"]["RANK"]))
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.environ.update(order["environment"])
    fork()
    sys.argv = ["speedlab-engine", *order["arguments"]]
    engine_process.take_place()
    remote.use_threads()
    _draw_other_numbers()
    engine_process.serve()


def _draw_other_numbers() -> None:
    """Seed NumPy again: a module that seeds itself at import would give all engines the same numbers.

    Python's `random` seeds itself after a fork, and torch always begins with the same seed.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _take_off_the_list(ended: dict[int, int]) -> None:
    """Reap ended engines; add their exit status to `ended`, by process id."""
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        return  # There is no child process.


def fork() -> None:
    """Fork the nanny of this process, which will become an engine and has no threads yet."""
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
        os._exit(0)  # Skip the exit handlers, which belong to the engine.
    os.close(orders)
    os.close(from_nanny)

    def start_nanny(**about: Any) -> tuple[str, IO[str]]:
        with suppress(BrokenPipeError), os.fdopen(to_nanny, "wb") as order:  # The nanny may have ended.
            pickle.dump({**about, "pid": os.getpid()}, order)
        answer = os.fdopen(answers)
        if not (url := answer.readline().strip()):
            raise RuntimeError("the nanny of this engine has ended; this log says why")
        return url, answer  # Keep the pipe open while the engine lives: the nanny notices when it closes.

    app.start_nanny = start_nanny


def _serve(orders: int, answers: int) -> None:
    """Wait until the engine has an id, then run its nanny until the engine ends."""
    from ipyparallel.engine.nanny import KernelNanny

    processes.name_nanny()
    os.setsid()  # Name first, session second: so the nanny never looks like an engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(orders, "rb") as order:
        about = order.read()
    if about:  # Otherwise the engine ended before it got an id.
        KernelNanny.main(**pickle.loads(about), pipe=os.fdopen(answers, "w", buffering=1))


if __name__ == "__main__":
    main()
