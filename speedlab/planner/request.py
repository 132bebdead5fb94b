"""Parse a plan request from text, as in a terminal or a notebook magic: `gpt3-175b`, `300B`, `128x8 A100-80 …`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from speedlab.config import OffloadConfig, OptimizerConfig, OuterConfig, RunConfig
from speedlab.config.sections import Away
from speedlab.hardware import Device
from speedlab.planner import presets
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.hardware.local import Hardware, hardware_here
from speedlab.planner.model_spec import ModelSizes, ModelSpec, subject_of
from speedlab.planner.plan import Found, Plan, plan, plan_setup
from speedlab.planner.search import Dtype, Target, fast_dtype, largest_model
from speedlab.planner.search_space import Fixed
from speedlab.planner.setup import Checkpointing, Setup

_COUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?) ?(?P<prefix>[kKMGBT]?)")
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?) ?(?P<unit>(?:[kKMGT]i?)?B)?")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What fits, how fast, and why, before anything runs."""

    model: str = ""
    """A model by name (gpt2, llama-3-8b, gpt3-175b, …), a Hugging Face folder or config.json, or a configuration."""
    config: str = ""
    """A training configuration, also DeepSpeed's."""
    machines: str = ""
    """Described devices: '8 H100', '128x8 A100-80 nvlink3 ib-200x8', or a known cluster; this machine when left out."""
    layers: int | None = None
    """Number of blocks, for a model without a name, or instead of the named model's."""
    hidden: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values; as many as heads when left out."""
    head_size: int | None = None
    """Width of an attention head; hidden / heads when left out."""
    ffn: int | None = None
    """Width inside the feed-forward layer; four times the hidden size when left out, 8/3 if it is gated."""
    vocab: int | None = None
    """Tokens of the vocabulary."""
    seq: int | None = None
    """Tokens of a sequence."""
    gated: bool = False
    """The feed-forward layer has a gate (a third matrix), as in Llama."""
    engines: int | None = None
    """Engines of this machine; one per GPU, or 4, when left out."""
    tp: int | None = None
    """Tensor-parallel ranks."""
    pp: int | None = None
    """Pipeline ranks."""
    cp: int | None = None
    """Context-parallel ranks, each with a part of every sequence."""
    dp: int | None = None
    """Data-parallel ranks; all remaining devices when left out."""
    islands: int | None = None
    """DiLoCo islands, which train parameters of their own and synchronise every few steps; a search takes 1 when left
    out.
    """
    outer_every_steps: int | None = None
    """Steps between two synchronisations of islands; 50 when left out."""
    outer_compression: Literal["none", "signs", "topk"] | None = None
    """Compression of what islands send; float32 (none) when left out."""
    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage."""
    quantized_weights: bool = False
    """Whether parameters are gathered as int8 blocks."""
    quantized_gradients: bool = False
    """Whether gradients are exchanged as int4 blocks, first inside hosts, then between hosts."""
    secondary_partition: int | None = None
    """Ranks of a host that together hold a second copy of all partitioned parameters; ZeRO stage 3 only."""
    micro: int | None = None
    """Sequences of a micro-batch."""
    global_size: int | None = None
    """Sequences of a step."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Compute dtype; the fast one of the devices when left out."""
    checkpointing: Checkpointing | None = None
    """What backward recomputes."""
    partition_inputs: bool = False
    """Whether each tensor-parallel rank keeps only 1/tp of a block's checkpointed input."""
    attention: Literal["fused", "plain"] | None = None
    """Whether attention's probabilities are never stored (fused, when left out) or stored (plain)."""
    chunked_loss: bool = False
    """Compute head and loss in chunks of tokens, so that whole logits never exist, as the built-in GPT does."""
    sequence_parallel: bool = False
    """Whether each tensor-parallel rank has a part of the sequence between the layers."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | None = None
    """Order of a pipeline's passes."""
    chunks: int | None = None
    """Pipeline stages of each rank, for interleaved and zero-bubble; 2 when left out."""
    masters: Literal["float32", "none"] | None = None
    """Whether bfloat16 parameters have float32 master weights (left out), or updates are rounded stochastically (none).
    """
    moments: Literal["float32", "8bit"] | None = None
    """Dtype of the optimizer's moments between steps; float32 when left out."""
    in_backward: bool = False
    """Update each unit in backward, so that no gradients are stored; for one dp rank and one micro-batch."""
    offload_optimizer: Away | None = None
    """Where optimizer states, float32 masters and summed gradients are stored."""
    offload_parameters: Away | None = None
    """Where parameters are stored while no unit needs them; ZeRO stage 3 only."""
    offload_activations: Literal["none", "host"] | None = None
    """Where inputs of blocks are stored until backward; with checkpointing of blocks only."""
    offload_delayed_update: int | None = None
    """First step whose update overlaps with the next step, which then uses parameters one update older."""
    host_bytes: str = ""
    """Memory of each host: 128GiB, 1.5TB."""
    disk_bytes: str = ""
    """Free bytes on the disk of each host: 30TB; on this machine the free space when left out."""
    tokens: str = ""
    """Tokens of the whole training: 300B, 1.5T."""
    price: float | None = None
    """Price of a device-hour, in any currency."""

    search: bool = False
    """Find the best layouts instead of planning one."""
    target: Target | None = None
    """What the search optimises; the fastest when left out."""
    largest: bool = False
    """Find the largest model that fits on the machines."""

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> PlanRequest:
        """Return the request of a notebook magic, where numbers may still be text.

        Args:
            words: option -> value, with '-' or '.' in names; `global` is accepted for `global_size`.

        Raises:
            TypeError: an option does not exist.
            ValueError: a number is malformed.
        """
        given: dict[str, Any] = {name.replace("-", "_").replace(".", "_"): value for name, value in words.items()}
        if "global" in given:
            given["global_size"] = given.pop("global")
        if "zero" in given:
            given["zero"] = int(given["zero"])
        if "price" in given:
            given["price"] = count(given["price"])
        return cls(**given)

    def answer(self, devices: list[Device]) -> Plan | Found:
        """Return the plan, the best layouts, or the largest model, depending on the request.

        Args:
            devices: the devices of this machine, used if no machines are named.

        Raises:
            LayoutError: the layout is impossible.
            ValueError: options contradict each other, or a value is impossible.
        """
        self._check()
        if self.largest:
            return self._largest(devices)
        if not self.search:
            return self.plan(devices)
        subject = self._subject()
        if subject.config is not None:
            # The batch comes from the file, independent of the searched layouts.
            base = replace(self, tp=None, pp=None, dp=None, schedule=None, chunks=None).plan(devices)
            # The other options are already part of `base`.
            return base.search(target=self.target or "fastest", fixed=replace(self._fixed(), others={}))
        if self.global_size is None:
            raise ValueError("a search needs the sequences of a step; add for instance --global 1536")
        assert subject.shape is not None
        return Found.of_search(
            subject.shape,
            self.hardware(devices),
            self.global_size,
            self.target or "fastest",
            dtype=self.dtype,
            fixed=self._fixed(),
            tokens=self._tokens(),
        )

    def plan(self, devices: list[Device]) -> Plan:
        """Return the plan of one layout.

        Args:
            devices: the devices of this machine, used if no machines are named.

        Raises:
            LayoutError: the layout is impossible.
            ValueError: another value is impossible.
        """
        subject = self._subject()
        config = subject.config
        hardware = self.hardware(devices, config)
        if config is not None:
            dtype = self._dtype(devices, config, hardware.machines)
            changed = self._changed(config)
            if changed.parallel.islands == 1:
                self._refuse_meetings()
            setup = Setup.of_config(changed, hardware.machines.world_size, dtype=dtype, shape=subject.shape)
            return plan_setup(replace(setup, **self._alongside()), hardware, tokens=self._tokens())
        assert subject.shape is not None
        return plan(
            subject.shape,
            hardware,
            tp=self.tp or 1,
            pp=self.pp or 1,
            cp=self.cp or 1,
            dp=self.dp,
            islands=self.islands or 1,
            micro_size=self.micro or 1,
            global_size=self.global_size,
            dtype=self.dtype,
            tokens=self._tokens(),
            **_given(
                zero_stage=self.zero,
                schedule=self.schedule,
                chunks=self.chunks,
                sequence_parallel=self.sequence_parallel,
                offload=OffloadConfig(**self._away()),
                **self._alongside(),
                **self._kept(),
            ),
        )

    def hardware(self, devices: list[Device], config: RunConfig | None = None) -> Hardware:
        """Return the machines of the request.

        Args:
            devices: the devices of this machine, used if no machines are named.
            config: the configuration, for its dtype and its folder of offloaded states.

        Raises:
            ValueError: both machines and engines are given, or a name or size is unknown.
        """
        if self.machines and self.engines is not None:
            raise ValueError(
                f"--engines {self.engines} counts this machine's, and --machines {self.machines!r} describes others; "
                "give one of the two"
            )
        if self.machines:
            found = Hardware.of(presets.cluster(self.machines, price_per_device_hour=self.price))
        else:
            folder = None if config is None else config.offload.folder or config.folder
            found = hardware_here(devices, self._dtype(devices, config), folder)
        host = replace(found.machines.host, **self._host_sizes())
        return replace(found, machines=replace(found.machines, host=host, price_per_device_hour=self.price))

    def _host_sizes(self) -> dict[str, int]:
        said = {"memory_bytes": self.host_bytes, "disk_bytes": self.disk_bytes}
        return {name: size_bytes(text) for name, text in said.items() if text}

    def _check(self) -> None:
        """Raise ValueError for options that contradict each other, instead of ignoring one of them."""
        if self.search and self.largest:
            raise ValueError("--search looks for layouts of a model, --largest for a model; give one of the two")
        if self.target is not None and not self.search:
            raise ValueError(f"--target {self.target} is what a search looks for; add --search")
        if self.price is not None and not self.tokens:
            raise ValueError("--price is of the whole training; say how long it is, for instance --tokens 300B")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ValueError(f"--price {self.price} is no price of a device-hour; give 0 or more")
        if self.islands == 1 or (self.islands is None and not self.config):
            self._refuse_meetings()
        if self.chunks is not None and self.schedule in ("gpipe", "1f1b"):
            raise ValueError(f"--chunks are of --schedule interleaved or zero-bubble, not of {self.schedule}")

    def _refuse_meetings(self) -> None:
        """Raise ValueError for options about several islands if there is only one."""
        if said := [f"--outer-{name.replace('_', '-')}" for name in self._meetings()]:
            raise ValueError(f"{' and '.join(said)}: said how islands meet, and there is one; add --islands 2, or more")

    def _largest(self, devices: list[Device]) -> Found:
        """Return the largest model that fits. Raise ValueError for options of a model: the search finds the model."""
        named = [self.model] if self.model else []
        named += [f"--config {self.config}"] if self.config else []
        chosen = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "gated")
        named += [f"--{name.replace('_', '-')}" for name in chosen if getattr(self, name)]
        if named:
            raise ValueError(f"--largest looks for the model, so that it cannot have {', '.join(named)}; leave it out")
        hardware = self.hardware(devices)
        fixed = self._fixed()
        largest = largest_model(
            hardware.machines,
            global_size=self.global_size,
            dtype=self.dtype,
            efficiency=hardware.efficiency,
            memory=hardware.memory,
            fixed=fixed,
            chunked_loss=self.chunked_loss,
            **_given(sequence_length=self.seq, vocab_size=self.vocab),
        )
        asked = f"the largest model that fits on {hardware.machines}{', with ' if str(fixed) else ''}{fixed}"
        return Found(asked=asked, candidates=() if largest is None else (largest,), tokens=self._tokens())

    def _subject(self) -> ModelSpec:
        sizes = ModelSizes(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            ffn_hidden=self.ffn,
            vocab_size=self.vocab,
            sequence_length=self.seq,
            gated=self.gated or None,
            chunked_loss=self.chunked_loss or None,
        )
        return subject_of(self.model, self.config, sizes, here=not self.machines)

    def _tokens(self) -> float | None:
        return count(self.tokens) if self.tokens else None

    def _dtype(self, devices: list[Device], config: RunConfig | None, machines: Machines | None = None) -> Dtype:
        """Return the requested dtype, with 'auto' resolved for these devices."""
        asked = "auto" if config is None else config.precision.dtype
        if self.dtype is not None:
            return self.dtype
        if asked != "auto":
            return asked
        if self.machines and machines is not None:
            return fast_dtype(machines)
        return "bfloat16" if all(device.fast_dtype == "bfloat16" for device in devices) else "float32"

    def _changed(self, config: RunConfig) -> RunConfig:
        """Return the configuration with the changes of the request."""
        axes = {
            "tp": self.tp,
            "pp": self.pp,
            "cp": self.cp,
            "dp": self.dp,
            "islands": self.islands,
            "schedule": self.schedule,
            "chunks": self.chunks,
        }
        parallel = _given(**axes, sequence=self.sequence_parallel or None)
        if self.pp not in (None, config.parallel.pp):
            parallel["cut"] = None  # The file's cut is for another number of stages.
        batch = _given(micro_size=self.micro, global_size=self.global_size)
        if len(batch) == 2:
            batch["accumulation"] = None  # Derived from the two sizes.
        changes = {
            "parallel": parallel,
            "zero": _given(stage=self.zero, **self._switches()),
            "batch": batch,
            "activation": _given(checkpointing=self.checkpointing, partition_inputs=self.partition_inputs or None),
            "precision": _given(masters=self.masters, moments=self.moments),
            "optimizer": _given(in_backward=self.in_backward or None),
            "offload": self._away(),
            "outer": self._meetings(),
        }
        given: dict[str, Any] = {part: values for part, values in changes.items() if values}
        if self.in_backward:
            given["clip_norm"] = None  # An update in backward cannot clip; clipping costs no memory or time here.
        return config.replace(**given)

    def _alongside(self) -> dict[str, Any]:
        """Return fields of a set-up that a configuration does not have, or has with fewer choices."""
        return _given(checkpointing=self.checkpointing, attention=self.attention)

    def _kept(self) -> dict[str, Any]:
        """Return fields of a set-up about the format of states and block inputs, and about updates."""
        optimizer = OptimizerConfig(in_backward=True) if self.in_backward else None
        return _given(
            masters=self.masters,
            moments=self.moments,
            optimizer=optimizer,
            partition_inputs=self.partition_inputs or None,
            outer=OuterConfig(**meetings) if (meetings := self._meetings()) else None,
            **self._switches(),
        )

    def _meetings(self) -> dict[str, Any]:
        """Return the given options of `outer`."""
        return _given(every_steps=self.outer_every_steps, compression=self.outer_compression)

    def _switches(self) -> dict[str, Any]:
        """Return the given options of ZeRO++."""
        return _given(
            quantized_weights=self.quantized_weights or None,
            quantized_gradients=self.quantized_gradients or None,
            secondary_partition=self.secondary_partition,
        )

    def _away(self) -> dict[str, Any]:
        """Return the given options of `offload`."""
        return _given(
            optimizer=self.offload_optimizer,
            parameters=self.offload_parameters,
            activations=self.offload_activations,
            delayed_update=self.offload_delayed_update,
        )

    def _fixed(self) -> Fixed:
        return Fixed(
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            cp=self.cp,
            islands=self.islands,
            zero_stage=self.zero,
            micro_size=self.micro,
            checkpointing=self.checkpointing,
            schedule=self.schedule,
            chunks=self.chunks,
            sequence_parallel=self.sequence_parallel or None,
            others=_given(
                attention=self.attention,
                offload=OffloadConfig(**away) if (away := self._away()) else None,
                **self._kept(),
            ),
        )


def _given(**values: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def count(text: str) -> float:
    """Parse a count: '300B', '1.5T', '3e11'.

    Raises:
        ValueError: the text is not a count.
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no count; write for instance 300B, 1.5T or 3e11")
    return _finite(float(found["number"]) * _PREFIXES[found["prefix"]], text)


def size_bytes(text: str) -> int:
    """Parse a size in bytes: '128GiB', '1.5 TB', '30e12'.

    Raises:
        ValueError: the text is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write for instance 128GiB (1024³ bytes each), 1.5TB (10¹²) or 30e12")
    prefix, binary = (found["unit"] or "B").removesuffix("B"), "i" in (found["unit"] or "")
    power = " kMGT".index(prefix.removesuffix("i").replace("K", "k") or " ")
    return round(_finite(float(found["number"]) * (1024 if binary else 1000) ** power, text))


def _finite(value: float, text: str) -> float:
    if value == math.inf:
        raise ValueError(f"{text!r} is more than can be counted with")
    return value
