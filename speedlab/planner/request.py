"""A plan asked for in words, as on a terminal or in a notebook's line: `gpt3-175b`, `300B`, `128x8 A100-80 …`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from speedlab.config import MODEL_PRESETS, RunConfig
from speedlab.hardware import Device
from speedlab.planner import presets
from speedlab.planner.devices import Machines
from speedlab.planner.here import Hardware, hardware_here
from speedlab.planner.nearest import unknown
from speedlab.planner.plan import Found, Plan, plan, plan_setup
from speedlab.planner.search import Dtype, Target, fast_dtype, largest_model
from speedlab.planner.setup import Checkpointing, ModelShape, Setup

_COUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?) ?(?P<prefix>[kKMGBT]?)")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What fits, how fast, and why, before anything runs."""

    model: str = ""
    """An announced model (gpt3-175b, 1t, …), a preset (gpt-tiny, …), or a configuration file."""
    machines: str = ""
    """Described devices: '128x8 A100-80 nvlink3 ib-200x8', or an announced cluster; left out: this machine."""
    engines: int | None = None
    """Engines of this machine; one per GPU, or 4, when left out."""
    tp: int | None = None
    """Tensor-parallel ranks."""
    pp: int | None = None
    """Pipeline ranks."""
    dp: int | None = None
    """Data-parallel ranks; left out: as many as there are devices for."""
    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage."""
    micro: int | None = None
    """Sequences of a micro-batch."""
    global_size: int | None = None
    """Sequences of a step."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Compute dtype; left out: the fast one of the devices."""
    checkpointing: Checkpointing | None = None
    """What is computed again in backward."""
    attention: Literal["fused", "plain"] = "fused"
    """Whether attention's probabilities are never kept (fused), or are (plain)."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks have each a part of the sequence between the layers."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | None = None
    """Order of a pipeline's passes."""
    chunks: int | None = None
    """Pipeline stages of each rank, for interleaved and zero-bubble."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lives in the host's memory."""
    tokens: str = ""
    """Tokens of the whole training: 300B, 1.5T."""
    price: float | None = None
    """Of a device-hour, in any currency."""

    search: bool = False
    """Find the best layouts instead of planning one."""
    target: Target = "fastest"
    """What the search looks for."""
    largest: bool = False
    """Find the largest model that fits on the machines."""

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> PlanRequest:
        """From a notebook's line, where numbers may still be text, and `global` is a word as any other."""
        given: dict[str, Any] = {"global_size" if name == "global" else name: value for name, value in words.items()}
        if "zero" in given:
            given["zero"] = int(given["zero"])
        if "price" in given:
            given["price"] = count(given["price"])
        return cls(**given)

    def answer(self, devices: list[Device]) -> Plan | Found:
        """What is asked for: a plan, the best layouts, or the largest model. Raises as `plan` does."""
        if self.largest:
            hardware = self.hardware(devices)
            largest = largest_model(
                hardware.machines, dtype=self.dtype, efficiency=hardware.efficiency, memory=hardware.memory
            )
            asked = f"the largest model that fits on {hardware.machines}"
            return Found(asked=asked, candidates=() if largest is None else (largest,))
        if not self.search:
            return self.plan(devices)
        if self._config() is not None:
            return self.plan(devices).search(target=self.target)
        if self.global_size is None:
            raise ValueError("a search needs the sequences of a step; add for instance --global 1536")
        hardware = self.hardware(devices)
        return Found.of_search(self._shape(), hardware, self.global_size, self.target, dtype=self.dtype)

    def plan(self, devices: list[Device]) -> Plan:
        """The plan; `devices` are this machine's, for where no machines are named. Raises ValueError."""
        tokens = count(self.tokens) if self.tokens else None
        config = self._config()
        hardware = self.hardware(devices, config)
        if config is not None:
            dtype = self._dtype(devices, config, hardware.machines)
            setup = Setup.of_config(config, hardware.machines.world_size, dtype=dtype)
            return plan_setup(setup, hardware, tokens=tokens)
        return plan(
            self._shape(),
            hardware,
            tp=self.tp or 1,
            pp=self.pp or 1,
            dp=self.dp,
            micro_size=self.micro or 1,
            global_size=self.global_size,
            dtype=self.dtype,
            tokens=tokens,
            **self._changes(),
        )

    def hardware(self, devices: list[Device], config: RunConfig | None = None) -> Hardware:
        """The machines that are meant, in the dtype of `config`."""
        if not self.machines:
            return hardware_here(devices, self._dtype(devices, config))
        if self.engines is not None:
            raise ValueError(
                f"--engines {self.engines} counts this machine's, and --machines {self.machines!r} describes others; "
                "give one of the two"
            )
        return Hardware.of(presets.cluster(self.machines, price_per_device_hour=self.price))

    def _dtype(self, devices: list[Device], config: RunConfig | None, machines: Machines | None = None) -> Dtype:
        """The dtype that is asked for, or that 'auto' stands for on these devices."""
        asked = "auto" if config is None else config.precision.dtype
        if self.dtype is not None:
            return self.dtype
        if asked != "auto":
            return asked
        if self.machines and machines is not None:
            return fast_dtype(machines)
        return "bfloat16" if all(device.fast_dtype == "bfloat16" for device in devices) else "float32"

    def _shape(self) -> ModelShape:
        names = sorted({*presets.MODELS, *MODEL_PRESETS})
        if not self.model:
            raise ValueError(f"no model is named; known: {', '.join(names)}; or give a configuration file")
        if self.model not in presets.MODELS:
            raise unknown("model", self.model, names)
        return presets.model(self.model)

    def _config(self) -> RunConfig | None:
        """The configuration that is meant, with what was asked for besides; None for an announced model."""
        if self.model.endswith(_FILES):
            if not Path(self.model).is_file():
                raise ValueError(f"{self.model}: there is no such file; `speedlab config` prints a configuration")
            config = RunConfig.load(self.model)
        elif self.model in MODEL_PRESETS and (not self.machines or self.model not in presets.MODELS):
            config = RunConfig(model=self.model)
        else:
            return None
        parallel = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "schedule": self.schedule, "chunks": self.chunks}
        parallel |= {"sequence": True} if self.sequence_parallel else {}
        given = {
            "parallel": parallel,
            "zero": {"stage": self.zero},
            "batch": {"micro_size": self.micro, "global_size": self.global_size},
            "activation": {"checkpointing": self.checkpointing},
        }
        changes = {part: {k: v for k, v in values.items() if v is not None} for part, values in given.items()}
        return config.replace(**{part: values for part, values in changes.items() if values})

    def _changes(self) -> dict[str, Any]:
        found = {
            "zero_stage": self.zero,
            "checkpointing": self.checkpointing,
            "attention": self.attention,
            "sequence_parallel": self.sequence_parallel,
            "schedule": self.schedule,
            "chunks": self.chunks,
            "offload": self.offload,
        }
        return {name: value for name, value in found.items() if value is not None}


def count(text: str) -> float:
    """'300B', '1.5T', '3e11' as a number. Raises ValueError."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no count; write for instance 300B, 1.5T or 3e11")
    return float(found["number"]) * _PREFIXES[found["prefix"]]
