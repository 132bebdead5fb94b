"""Parse descriptions of machines in many spellings: '8xA100', '2x8 H100', 'H100-80GB', '2 nodes x 8 H100'."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_IN_HOST = 16
"""Maximum number of devices in one host (NVIDIA's DGX-2)."""
USUAL_IN_HOST = 8

_HOSTS = r"(?:nodes?|hosts?|machines?|servers?|box(?:es)?|instances?)"
_WORDS = re.compile(
    rf"""
    (?:(?P<hosts>\d+)\ ?(?:(?P<named>{_HOSTS})\ ?)?(?:x|of|with)?\ ?)?      # '2 nodes x ', '2x', or, alone, '8x'
    (?:(?P<count>\d+)\ ?(?:x|of)?\ ?)?                                      # '8 '
    (?P<device>(?!x\d)[a-z]+\d+(?:[a-wyz][a-z]*|x\b)?)                     # 'A100'; the x of 'a100x8' counts
    (?P<variant>(?:[ -]sxm\d*|[ -]\d+\ ?gi?b(?![a-wyz])|-\d+)*)             # '-80', ' 80GB', '-SXM4-80GB'
    (?:\ ?x\ ?(?P<after>\d+)\b(?!\ ?{_HOSTS}))?                             # ' x 8'
    (?P<each>\ (?:per|in\ each)\ {_HOSTS})?
    (?:\ (?:(?P<joint>x|in|on|across|over)\ ?)?(?P<behind>\d+)\ ?{_HOSTS})?     # ' on 2 nodes'
    (?P<links>(?:\ \S+)*)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NOISE = re.compile(r"\b(?:nvidia|tesla|gpus?|each|and)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MachineWords:
    """The parts of a description of machines."""

    hosts: int | None
    """None if not given."""
    count: int
    """Devices of each host; of all hosts together if their number is not given."""
    device: str
    """As written, without the memory: 'a100'."""
    memory: int | None
    """GB printed on the card; None if not given."""
    links: tuple[str, ...]

    @property
    def written(self) -> str:
        """The device with its memory, as written."""
        return self.device if self.memory is None else f"{self.device}-{self.memory}"


def read_words(text: str) -> MachineWords:
    """Parse a description of machines.

    Raises:
        ValueError: the text does not say how many of which device, or counts hosts twice.
    """
    # Normalise: punctuation to spaces, '×' and '*' to 'x', no filler words.
    plain = _NOISE.sub(" ", re.sub(r"[×*]", "x", re.sub(r"[,;+()]", " ", text)))
    found = _WORDS.fullmatch(" ".join(plain.split()))
    if found is None or (found["named"] and not (found["count"] or found["after"])):
        raise ValueError(
            f"machines {text!r} do not say how many of what; write for instance '8 H100' (one host), '2x8 H100' (two "
            "hosts of 8) or '64x8 A100-80 nvlink3 ib-200x8' (with their links)"
        )
    hosts, count = found["hosts"], found["count"] or found["after"]
    if count is None:
        hosts, count = None, hosts or "1"
    devices = int(count)
    if found["behind"]:
        if hosts is not None:
            raise ValueError(
                f"machines {text!r} count hosts twice; write for instance '{hosts}x{count} {found['device']}'"
            )
        hosts = found["behind"]
        if (found["joint"] or "").lower() != "x" and not found["each"]:
            devices, rest = divmod(devices, max(1, int(hosts)))
            if rest:
                raise ValueError(f"machines {text!r}: {count} devices do not divide by {hosts} hosts")
    memory = re.findall(r"(?<![a-z\d])\d+", found["variant"], re.IGNORECASE)
    return MachineWords(
        hosts=None if hosts is None else int(hosts),
        count=devices,
        device=found["device"],
        memory=int(memory[-1]) if memory else None,
        links=tuple(found["links"].split()),
    )
