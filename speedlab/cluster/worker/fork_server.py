"""The process that engines are forked off: `python -m speedlab.cluster.worker.fork_server DESCRIPTOR`, started by
`nursery.py`.

1. Import torch and the engine, and say so in a line on the pipe of that descriptor. It starts no thread, touches no
   device and joins no group: nothing that a fork breaks.
2. For every line of its input, an order as JSON, fork an engine, and answer with a line: its process id, or why not.
   Asked for those that have ended, answer with their exit statuses. An answer has the number of its order.
3. End with its input, when whoever started it has ended. Engines live on.

ipyparallel's nanny of an engine, as a fork of it.

The nanny tells the controller at once that its engine's process has ended. ipyparallel starts it by a command, and the
engine waits while it imports everything again: a third of a second of a core. A fork has it all.
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
    """Fork engines until the input ends."""
    processes.name_fork_server()
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    remote.preload()
    _import_the_rest()
    gc.collect()
    gc.freeze()  # What the collector never looks at stays shared with the engines.
    ended: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda number, frame: _take_off_the_list(ended))
    _answer(answers, {"ready": True})
    for line in sys.stdin.buffer:
        order = json.loads(line)
        number = {"number": order["number"]}
        if "ended" in order:
            _take_off_the_list(ended)  # The signal of one that has just ended may not have come yet.
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
            return  # It ends as any process does, and takes no orders.
        os.close(log)
        _answer(answers, {**number, "pid": pid})


def _answer(answers: int, answer: dict[str, Any]) -> None:
    os.write(answers, json.dumps(answer).encode() + b"\n")


def _import_the_rest() -> None:
    """What every engine imports before it is ready."""
    import ipyparallel.engine.app
    import ipyparallel.engine.kernel
    import ipyparallel.engine.nanny

    assert ipyparallel.engine.app
    assert ipyparallel.engine.kernel
    assert ipyparallel.engine.nanny


def _become_an_engine(order: dict[str, Any], log: int) -> None:
    """As if `engine_process` had been started with this environment, these arguments and this file for its output."""
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
    """Modules that seed themselves when they are imported would draw the same numbers in every engine; Python's own
    does so after a fork by itself, and torch always begins with the same seed."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _take_off_the_list(ended: dict[int, int]) -> None:
    """Engines that have ended are the system's to forget; `ended`: how, by process id."""
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        return  # None is left.


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


if __name__ == "__main__":
    main()
