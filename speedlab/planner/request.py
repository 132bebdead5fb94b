"""A plan asked for in words, as on a terminal or in a notebook's line: `gpt3-175b`, `300B`, `128x8 A100-80 …`."""

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
    """A configuration, also DeepSpeed's, by which the model is trained."""
    machines: str = ""
    """Described devices: '8 H100', '128x8 A100-80 nvlink3 ib-200x8', or an announced cluster; else this machine."""
    layers: int | None = None
    """Of a model that has no name, or instead of the named one's: blocks."""
    hidden: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values; as many as heads when left out."""
    head_size: int | None = None
    """Width of an attention head; hidden / heads when left out."""
    ffn: int | None = None
    """Width inside the feed-forward layer; four times the hidden size when left out, 8/3 where it is gated."""
    vocab: int | None = None
    """Tokens of the vocabulary."""
    seq: int | None = None
    """Tokens of a sequence."""
    gated: bool = False
    """The feed-forward layer has a gate, a third matrix, as Llama's."""
    engines: int | None = None
    """Engines of this machine; one per GPU, or 4, when left out."""
    tp: int | None = None
    """Tensor-parallel ranks."""
    pp: int | None = None
    """Pipeline ranks."""
    cp: int | None = None
    """Context-parallel ranks, each with a part of every sequence."""
    dp: int | None = None
    """Data-parallel ranks; left out: as many as there are devices for."""
    islands: int | None = None
    """Islands of ranks that train parameters of their own and meet every few steps; a search takes 1 when left out."""
    outer_every_steps: int | None = None
    """Steps of islands between two meetings; 50 when left out."""
    outer_compression: Literal["none", "signs", "topk"] | None = None
    """As what islands send how far they went; float32 (none) when left out."""
    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage."""
    quantized_weights: bool = False
    """Whether parameters are gathered as int8 blocks."""
    quantized_gradients: bool = False
    """Whether gradients are exchanged as int4 blocks, inside hosts, then between them."""
    secondary_partition: int | None = None
    """Ranks of a host that hold all partitioned parameters together once more; ZeRO stage 3 only."""
    micro: int | None = None
    """Sequences of a micro-batch."""
    global_size: int | None = None
    """Sequences of a step."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Compute dtype; left out: the fast one of the devices."""
    checkpointing: Checkpointing | None = None
    """What is computed again in backward."""
    partition_inputs: bool = False
    """Whether of a block's input that is kept for backward each tensor rank keeps its 1/tp."""
    attention: Literal["fused", "plain"] | None = None
    """Whether attention's probabilities are never kept (fused, when left out), or are (plain)."""
    chunked_loss: bool = False
    """Head and loss a few tokens at a time, so that logits are never whole, as the built-in GPT has them."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks have each a part of the sequence between the layers."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | None = None
    """Order of a pipeline's passes."""
    chunks: int | None = None
    """Pipeline stages of each rank, for interleaved and zero-bubble; 2 when left out."""
    masters: Literal["float32", "none"] | None = None
    """Whether parameters in bfloat16 have float32 masters beside them (left out), or are rounded stochastically."""
    moments: Literal["float32", "8bit"] | None = None
    """As what the optimizer's moments are kept between two steps; float32 when left out."""
    in_backward: bool = False
    """Update each unit in backward, so that no gradients are kept; for one dp rank and one micro-batch."""
    offload_optimizer: Away | None = None
    """Where optimizer states, float32 masters and summed gradients lie."""
    offload_parameters: Away | None = None
    """Where parameters lie while no unit needs them; ZeRO stage 3 only."""
    offload_activations: Literal["none", "host"] | None = None
    """Where inputs of blocks wait for backward; with checkpointing of blocks only."""
    offload_delayed_update: int | None = None
    """First step whose update runs beside the next step, which so uses parameters one update older."""
    host_bytes: str = ""
    """Memory of each host: 128GiB, 1.5TB."""
    disk_bytes: str = ""
    """Free on the disk of each host: 30TB; on this machine what is free there when left out."""
    tokens: str = ""
    """Tokens of the whole training: 300B, 1.5T."""
    price: float | None = None
    """Of a device-hour, in any currency."""

    search: bool = False
    """Find the best layouts instead of planning one."""
    target: Target | None = None
    """What the search looks for; the fastest when left out."""
    largest: bool = False
    """Find the largest model that fits on the machines."""

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> PlanRequest:
        """From a notebook's line, where numbers may still be text, and `global` is a word as any other."""
        given: dict[str, Any] = {name.replace("-", "_").replace(".", "_"): value for name, value in words.items()}
        if "global" in given:
            given["global_size"] = given.pop("global")
        if "zero" in given:
            given["zero"] = int(given["zero"])
        if "price" in given:
            given["price"] = count(given["price"])
        return cls(**given)

    def answer(self, devices: list[Device]) -> Plan | Found:
        """What is asked for: a plan, the best layouts, or the largest model. Raises as `plan` does."""
        self._check()
        if self.largest:
            return self._largest(devices)
        if not self.search:
            return self.plan(devices)
        subject = self._subject()
        if subject.config is not None:
            # The batch is the file's, whatever layouts are looked for.
            base = replace(self, tp=None, pp=None, dp=None, schedule=None, chunks=None).plan(devices)
            # What else is said is part of the base.
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
        """The plan; `devices` are this machine's, for where no machines are named. Raises ValueError."""
        subject = self._subject()
        config = subject.config
        hardware = self.hardware(devices, config)
        if config is not None:
            dtype = self._dtype(devices, config, hardware.machines)
            changed = self._changed(config)
            if changed.parallel.islands == 1:
                self._refuse_meetings()
            setup = Setup.of_config(changed, hardware.machines.world_size, dtype=dtype, shape=subject.shape)
            return plan_setup(replace(setup, **self._beside()), hardware, tokens=self._tokens())
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
                **self._beside(),
                **self._kept(),
            ),
        )

    def hardware(self, devices: list[Device], config: RunConfig | None = None) -> Hardware:
        """The machines that are meant, in the dtype of `config`."""
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
        """Raises ValueError for words that do not go together, rather than leave one of them out."""
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
        """Raises ValueError for words about how islands meet; there is one."""
        if said := [f"--outer-{name.replace('_', '-')}" for name in self._meetings()]:
            raise ValueError(f"{' and '.join(said)}: said how islands meet, and there is one; add --islands 2, or more")

    def _largest(self, devices: list[Device]) -> Found:
        """Raises ValueError where something of the model is said: that is what is looked for."""
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
        """The dtype that is asked for, or that 'auto' stands for on these devices."""
        asked = "auto" if config is None else config.precision.dtype
        if self.dtype is not None:
            return self.dtype
        if asked != "auto":
            return asked
        if self.machines and machines is not None:
            return fast_dtype(machines)
        return "bfloat16" if all(device.fast_dtype == "bfloat16" for device in devices) else "float32"

    def _changed(self, config: RunConfig) -> RunConfig:
        """The configuration with what was asked for besides."""
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
            parallel["cut"] = None  # The file's is of another number of stages.
        batch = _given(micro_size=self.micro, global_size=self.global_size)
        if len(batch) == 2:
            batch["accumulation"] = None  # It follows.
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
            given["clip_norm"] = None  # Which a plan does not count, and a run would have to leave out.
        return config.replace(**given)

    def _beside(self) -> dict[str, Any]:
        """Fields of a set-up that no configuration has, or with fewer choices."""
        return _given(checkpointing=self.checkpointing, attention=self.attention)

    def _kept(self) -> dict[str, Any]:
        """Fields of a set-up that say as what states and inputs of blocks are kept, and how long."""
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
        """What is said of how islands meet, as fields of `outer`."""
        return _given(every_steps=self.outer_every_steps, compression=self.outer_compression)

    def _switches(self) -> dict[str, Any]:
        """What is said of ZeRO++."""
        return _given(
            quantized_weights=self.quantized_weights or None,
            quantized_gradients=self.quantized_gradients or None,
            secondary_partition=self.secondary_partition,
        )

    def _away(self) -> dict[str, Any]:
        """What is said of where states lie, as fields of `offload`."""
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
    """Without what is not said."""
    return {name: value for name, value in values.items() if value is not None}


def count(text: str) -> float:
    """'300B', '1.5T', '3e11' as a number. Raises ValueError."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no count; write for instance 300B, 1.5T or 3e11")
    return _finite(float(found["number"]) * _PREFIXES[found["prefix"]], text)


def size_bytes(text: str) -> int:
    """'128GiB', '1.5 TB', '30e12' as bytes. Raises ValueError."""
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
