"""The protocol between a supervisor and its clients: every message, and one version for all.

1. A client sends `Hello` and receives `Welcome`.
2. The client sends requests, each with its own number, and receives an `Answer` or `Refused` with that number.
3. In between, the supervisor sends notifications about submissions and about the output of ranks.

Fields that a later version adds have defaults, and unknown fields are ignored. So `VERSION` increases only if existing
fields change their meaning.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

VERSION = 2


class ProtocolMessage(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Base class of all messages."""


class Hello(ProtocolMessage, kw_only=True):
    """The first message of a client."""

    version: int = VERSION


class Welcome(ProtocolMessage, kw_only=True):
    """The answer to `Hello`, after the cluster is ready; `token` identifies the cluster."""

    version: int = VERSION
    token: str


class Question(ProtocolMessage, kw_only=True):
    """A request of a client; `call` is the number of its answer."""

    call: int = 0
    answer: ClassVar[Any] = None
    """Type of the answer's value."""


class Submit(Question, kw_only=True):
    """Execute `work`, packed by `serialization.pack`, on these ranks or on all; the answer is the list of ranks."""

    id: str
    """Id that the client chose. A repeated request, after a lost connection, is the same submission."""
    work: bytes
    ranks: list[int] | None = None
    shown: bool = False
    """Whether the client wants the output of the ranks in it, by `DisplayMessage`."""
    answer: ClassVar[Any] = list[int]


class ResumeSubmission(Question, kw_only=True):
    """Subscribe to a submission again after a lost connection; the answer is the list of its ranks, [] if it is
    unknown.
    """

    id: str
    shown: bool = False
    answer: ClassVar[Any] = list[int]


class Interrupt(Question, kw_only=True):
    """Interrupt everything, or one submission, or the run in `folder`; the answer is the list of ranks that are idle
    afterwards.
    """

    id: str = ""
    folder: str = ""
    seconds: float = 2.0
    answer: ClassVar[Any] = list[int]


class RankStatus(ProtocolMessage, kw_only=True):
    """The current status of one rank's engine; `EngineStatus` without the device."""

    rank: int
    engine_id: int
    pid: int
    state: str
    rss_bytes: int
    cpu_cores: float | None = None
    """CPU time per second of wall time since the last look, in cores. None at the first look, and if the supervisor
    does not measure it.
    """
    gpu_share: float | None = None
    """Share of the recent past in which the GPU computed, 0 to 1. None without a GPU, or if NVML gives no value."""


class GetRankStatus(Question, kw_only=True):
    """Return the current status of each rank's engine."""

    answer: ClassVar[Any] = list[RankStatus]


class Restart(Question, kw_only=True):
    """End the engines of these ranks and start new ones."""

    rank: int
    more: list[int] = []


class ResizeCluster(Question, kw_only=True):
    """Change the number of engines; `Progress` messages carry the same number."""

    engines: int
    only_look: bool = False
    """Whether to check only whether the cluster can have so many engines."""


class Cancel(Question, kw_only=True):
    """Cancel the request with this number, if that is possible: engines that are being started are ended, a run is not
    locked.

    The request is then answered as failed; if it is too late, it is answered as usual.
    """


class Stop(Question, kw_only=True):
    """End all engines, the controller and the supervisor."""


class SubscribeOutput(Question, kw_only=True):
    """Start or stop sending the output of ranks, by `Printed`."""

    on: bool = True


class StartRun(Question, kw_only=True):
    """Start a new run on the ranks."""

    folder: str


class SendCommand(Question, kw_only=True):
    """Post a command to a run; the answer is its number. A command that is repeated with the same `key` is
    posted once.
    """

    folder: str
    word: str
    arguments: dict[str, Any]
    key: str
    answer: ClassVar[Any] = int


class WakeRun(Question, kw_only=True):
    """Submit a run if commands wait for it: its client may not have sent the last one on."""

    folder: str


class RunStatus(ProtocolMessage, kw_only=True):
    """Whether a run is active, as its supervisor sees it."""

    active: bool = False
    """Whether the ranks work on it, or will do so when they are idle."""
    recovering: bool = False
    """Whether its engines are being recovered, or a recovery waits for its next attempt."""
    trouble: str = ""
    """Why a waiting command could not be sent to the ranks."""
    trouble_kind: str = ""


class GetRunStatus(Question, kw_only=True):
    """Return whether a run is active, as its supervisor sees it."""

    folder: str
    answer: ClassVar[Any] = RunStatus


class LockRun(Question, kw_only=True):
    """Lock a run until `ReleaseRun` with the same `key`, or until this client disconnects.

    If the supervisor ends first, the lock lasts until the client's process ends.
    """

    folder: str
    seconds: float
    key: str


class ReleaseRun(Question, kw_only=True):
    """Release the lock with this key."""

    folder: str
    key: str


class Answer(ProtocolMessage, kw_only=True):
    """The answer to the request `call`."""

    call: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")


class Refused(ProtocolMessage, kw_only=True):
    """The refusal of the request `call`: `kind` is the class of the error. Call 0 is the greeting."""

    call: int
    kind: str
    text: str


class Progress(ProtocolMessage, kw_only=True):
    """What is being done for the request `call`."""

    call: int
    text: str


class Ended(ProtocolMessage, kw_only=True):
    """A rank has ended a submission: with the packed `value`, or with the fields of a RemoteFailure."""

    id: str
    rank: int
    value: bytes = b""
    failure: dict[str, Any] | None = None


class DisplayMessage(ProtocolMessage, kw_only=True):
    """A rank printed or displayed something in a submission with `shown`; content as in Jupyter's protocol."""

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
    | SubscribeOutput
    | StartRun
    | SendCommand
    | WakeRun
    | GetRunStatus
    | LockRun
    | ReleaseRun
)
FromSupervisor = Welcome | Answer | Refused | Progress | Ended | DisplayMessage | Printed
