"""What DeepSpeed's keys say of where states lie: `offload_optimizer`, `offload_param`, and their older switches.

They act from a certain ZeRO stage on. How they are tuned (`aio`, buffers, pinned memory) is in the schema, as what has
no effect here.
"""

from __future__ import annotations

from typing import Any

from speedlab.config.deepspeed_keys import Keys, word, yes
from speedlab.config.deepspeed_schema import OFFLOAD

_PLACES = {"none": "none", "cpu": "host", "nvme": "disk"}
"""DeepSpeed's device -> where a state lies between two uses."""

_ACTS = {
    "optimizer": (OFFLOAD[0], "zero_optimization.cpu_offload", 1),
    "parameters": (OFFLOAD[1], "zero_optimization.cpu_offload_param", 3),
}
"""Field of offload -> its section, the older switch, and the stage from which on they act."""


def offload(keys: Keys) -> None:
    stage = keys.settings.get("zero", {}).get("stage", 2)
    for field, (section, switch, least) in _ACTS.items():
        _switch(keys, switch, field, stage, least)
        _section(keys, section, field, stage, least)
    places = keys.settings.get("offload", {})
    if places.get("parameters", "none") != "none" and places.get("optimizer", "none") == "none":
        keys.set("offload.optimizer", "host")
        keys.warnings.append(
            "offload_param without offload_optimizer: offload.optimizer is 'host' here, where DeepSpeed leaves "
            "optimizer states on the device, because an update reads and writes both in one place"
        )


def _switch(keys: Keys, path: str, field: str, stage: int, least: int) -> None:
    """The switch of releases before offload had sections."""
    if not keys.has(path):
        return
    if stage < least:
        keys.ignore(path, _too_low(stage, least))
    elif (on := keys.take(path, yes)) is True:
        keys.honour(path, f"offload.{field}", "host")
    elif on is False:
        keys.agree(path, "partitions stay on the device")


def _section(keys: Keys, section: str, field: str, stage: int, least: int) -> None:
    device_path, folder_path = f"{section}.device", f"{section}.nvme_path"
    if stage < least:
        for path in (device_path, folder_path):
            if keys.has(path):
                keys.ignore(path, _too_low(stage, least))
        return
    device = keys.take(device_path, word)
    if device == "none":
        keys.set(f"offload.{field}", "none")  # Also where an older switch says otherwise.
        keys.agree(device_path, "partitions stay on the device")
    elif device in _PLACES:
        keys.honour(device_path, f"offload.{field}", _PLACES[device])
    elif device is not None:
        keys.refuse(device_path, f"{device!r} is none of DeepSpeed's places; it has {', '.join(_PLACES)}")
    if device == "nvme":
        _folder(keys, folder_path)
    elif keys.has(folder_path):
        keys.ignore(folder_path, "nothing of this section is on disk")


def _folder(keys: Keys, path: str) -> None:
    """All states on disk are in one folder here."""
    folder: Any = keys.take(path, word)
    chosen = keys.settings.get("offload", {}).get("folder")
    if folder is None and chosen is None:
        keys.assumed.append(f"{path}: the run's own folder; DeepSpeed asks for one")
    elif folder is not None and chosen in (None, folder):
        keys.honour(path, "offload.folder", folder)
    elif folder is not None:
        keys.ignore(path, f"all states on disk are in one folder here, {chosen!r}", warn=True)


def _too_low(stage: int, least: int) -> str:
    return f"it acts from ZeRO stage {least} on, and the stage is {stage}"


def activations(keys: Keys) -> None:
    """Whether inputs of blocks wait on the host; who says so has blocks computed again."""
    path = "activation_checkpointing.cpu_checkpointing"
    if (on := keys.take(path, yes)) is True:
        keys.set("activation.checkpointing", "block")
        keys.honour(path, "offload.activations", "host", "what waits there are inputs of blocks")
    elif on is False:
        keys.agree(path, "inputs of blocks stay on the device")
