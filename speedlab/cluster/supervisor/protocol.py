"""What a supervisor and its clients say to each other: every message, defined once, and the version of all of them.

A client greets with `Hello` and is answered with `Welcome`. From then on it asks, each question with a number of its
own, and gets an `Answer` or a `Refused` with that number; between them come messages that nobody asked for, about
submissions and about what ranks print. Fields that a later version adds have defaults, and unknown ones are passed
over, so that `VERSION` counts up only when the meaning of what is there changes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

VERSION = 2


class ProtocolMessage(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Anything that travels."""


class Hello(ProtocolMessage, kw_only=True):
    """The first word of a client."""

    version: int = VERSION


class Welcome(ProtocolMessage, kw_only=True):
    """The supervisor's answer to Hello, once the cluster is ready. `token`: which cluster it is."""

    version: int = VERSION
    token: str


class Question(ProtocolMessage, kw_only=True):
    """What a client asks. `call`: the number under which it is answered."""

    call: int = 0
    answer: ClassVar[Any] = None
    """Type of the answer's value."""


class Submit(Question, kw_only=True):
    """Run `work`, as `shipping.pack` packed it, on these ranks, or on all; answered with the ranks it went to."""

    id: str
    """The client's own name for the submission; sent twice, after a loss of the connection, it is one submission."""
    work: bytes
    ranks: list[int] | None = None
    shown: bool = False
    """Whether the client wants what the ranks print and display in it, by `DisplayMessage`."""
    answer: ClassVar[Any] = list[int]


class ResumeSubmission(Question, kw_only=True):
    """Hear of a submission again, after a loss of the connection; answered with the ranks it went to, [] if none."""

    id: str
    shown: bool = False
    answer: ClassVar[Any] = list[int]


class Interrupt(Question, kw_only=True):
    """Interrupt everything, or one submission, or the run in `folder`; answered with the ranks that are idle then."""

    id: str = ""
    folder: str = ""
    seconds: float = 2.0
    answer: ClassVar[Any] = list[int]


class RankStatus(ProtocolMessage, kw_only=True):
    """One rank's engine, as it is now; `EngineStatus` without the device."""

    rank: int
    engine_id: int
    pid: int
    state: str
    rss_bytes: int
    cpu_cores: float | None = None
    """Cores' worth of CPU time that it took since the look before; None at the first look, and of a supervisor that
    does not measure it."""
    gpu_share: float | None = None
    """Share of the last moments in which its GPU computed, 0 to 1; None where there is none, or NVML is silent."""


class GetRankStatus(Question, kw_only=True):
    """Each rank's engine, as it is now."""

    answer: ClassVar[Any] = list[RankStatus]


class Restart(Question, kw_only=True):
    """End the engines of these ranks and start new ones."""

    rank: int
    more: list[int] = []


class ResizeCluster(Question, kw_only=True):
    """Change the number of engines. `Progress` comes with the same number."""

    engines: int
    only_look: bool = False
    """Whether to look only whether there can be so many."""


class Cancel(Question, kw_only=True):
    """Give up the question of this number, where it can be: engines that are being started are ended again, a run is
    not held. It is answered as one that failed, or, once it is too late, as it would have been."""


class Stop(Question, kw_only=True):
    """End all engines, the controller and the supervisor."""


class Subscribe(Question, kw_only=True):
    """From now on send, or no longer send, what ranks print, by `Printed`."""

    on: bool = True


class StartRun(Question, kw_only=True):
    """A new run: let the ranks begin with it."""

    folder: str


class SendCommand(Question, kw_only=True):
    """A control word for a run; answered with its number. `key`: sent twice, it is one word."""

    folder: str
    word: str
    arguments: dict[str, Any]
    key: str
    answer: ClassVar[Any] = int


class WakeRun(Question, kw_only=True):
    """Look after a run, whose last word its client may not have sent on."""

    folder: str


class RunStatus(ProtocolMessage, kw_only=True):
    """How a run stands with its ranks."""

    active: bool = False
    """Whether the ranks work on it, or will as soon as they are free."""
    recovering: bool = False
    """Whether engines are brought back for it, or it waits to try again."""
    trouble: str = ""
    """Why a waiting word could not be sent to the ranks."""
    trouble_kind: str = ""


class GetRunStatus(Question, kw_only=True):
    """How a run stands with its ranks."""

    folder: str
    answer: ClassVar[Any] = RunStatus


class LockRun(Question, kw_only=True):
    """Let nobody advance the run until `ReleaseRun` of the same `key`, or until this client is gone: where the
    supervisor is gone first, until this client's process is."""

    folder: str
    seconds: float
    key: str


class ReleaseRun(Question, kw_only=True):
    """The end of the `LockRun` of this key."""

    folder: str
    key: str


class Answer(ProtocolMessage, kw_only=True):
    """The answer to the question `call`."""

    call: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")


class Refused(ProtocolMessage, kw_only=True):
    """The question `call` was refused; `kind` is the error's class, 0 as `call` stands for the greeting."""

    call: int
    kind: str
    text: str


class Progress(ProtocolMessage, kw_only=True):
    """What is being done about the question `call`."""

    call: int
    text: str


class Ended(ProtocolMessage, kw_only=True):
    """A rank has returned from a submission: with `value`, packed, or with the fields of a RemoteFailure."""

    id: str
    rank: int
    value: bytes = b""
    failure: dict[str, Any] | None = None


class DisplayMessage(ProtocolMessage, kw_only=True):
    """A rank printed or displayed something in a submission that is shown; content as in Jupyter's protocol."""

    id: str
    rank: int
    kind: str
    content: dict[str, Any]


class Printed(ProtocolMessage, kw_only=True):
    """Ranks printed the same text; `stream` is 'stdout' or 'stderr'."""

    ranks: list[int]
    stream: str
    text: str


FromClient = (
    Hello
    | Submit
    | ResumeSubmission
    | Interrupt
    | GetRankStatus
    | Restart
    | ResizeCluster
    | Cancel
    | Stop
    | Subscribe
    | StartRun
    | SendCommand
    | WakeRun
    | GetRunStatus
    | LockRun
    | ReleaseRun
)
FromSupervisor = Welcome | Answer | Refused | Progress | Ended | DisplayMessage | Printed
