"""Turn rows of published throughput into set-ups: what the row says, and what is known of its system.

Missing information is assumed and named; such rows are reported separately from complete ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from speedlab.config import OffloadConfig, OptimizerConfig
from speedlab.config.model_shape import BIASES
from speedlab.layout import Layout
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.hardware.links import parse_link
from speedlab.planner.setup import AttentionKind, Checkpointing, ModelShape, Setup

Row = dict[str, Any]

_GPUS = {
    "A100-40GB": "A100-40",
    "A100-SXM-40GB": "A100-40",
    "DGX-A100": "A100-40",
    "A100-SXM-80GB": "A100-80",
    "A800-80GB PCIe": "A100-80",
    "H100-80GB": "H100",
    "H100 94GB": "H100",
    "H100-SXM 96GB HBM2e (500W cap)": "H100",
    "V100-16GB PCIe": "V100-16",
    "V100-32GB": "V100-32",
    "V100-SXM2-32GB": "V100-32",
    "V100-SXM3-32GB": "V100-32",
}


@dataclass(frozen=True, kw_only=True)
class System:
    """Known properties of the software and the network of a family of rows."""

    network: str = ""
    network_printed: bool = True
    attention: AttentionKind = "plain"
    dropout: float = 0.1
    gated: bool = False
    bias: bool = True
    dtype: Literal["float16", "bfloat16"] = "float16"
    scattered: bool = False
    wide_sums: bool = False
    overlap: tuple[Literal["dp", "tp", "pp"], ...] = ()
    zero_stage: int = 0
    """Default if the row has no stage."""
    measured_network: bool = False
    """Whether the bandwidth is a measurement, rather than the number printed on the card."""
    listed_gathers: bool = False
    vocab_size: int = 51200
    per_host: int = 8
    assumed: str = ""
    """Further assumptions for the family's rows."""


_V100_HOSTS = System(network="opa-100x4", per_host=4, vocab_size=50257)
_SELENE = System(network="ib-200x8", scattered=True)
_FUSED = System(attention="fused", dropout=0.0, dtype="bfloat16", bias=False, wide_sums=True)
_LLAMA = replace(_FUSED, gated=True, network="roce-400x8")
_CAPPED = "an H100 of 500 W with slower memory, taken as H100"

SYSTEMS = {
    "azure": System(network="ib-200x8"),
    "bs-52b": _V100_HOSTS,
    "bs-52b-z3": replace(_V100_HOSTS, listed_gathers=True),
    "bs-1b3": _V100_HOSTS,
    "bs-": System(network="opa-100x4", dtype="bfloat16", wide_sums=True),
    "fsdp-aws": System(network="efa-100x4", vocab_size=50000),
    "korth": _SELENE,
    "mtnlg": _SELENE,
    "sc21-t2": _SELENE,
    "sc21-t2-zero": replace(_SELENE, listed_gathers=True),
    "sc21": replace(_SELENE, assumed="micro-batch 1, two pipeline stages a rank"),
    "llama3": replace(_LLAMA, overlap=("dp", "pp"), assumed="micro-batch 1, five pipeline stages a rank, cut unevenly"),
    "mosaic-a": replace(_FUSED, network="roce-200x8", wide_sums=False),
    "mosaic-h": replace(_FUSED, network="ib-400x8", wide_sums=False, network_printed=False),
    "nanotron": replace(_LLAMA, network="efa-400x8", network_printed=False, assumed="no checkpointing"),
    "nv20": System(),
    "nv24": replace(
        _FUSED,
        network="ib-400x8",
        wide_sums=False,
        overlap=("dp", "tp", "pp"),
        zero_stage=1,
        assumed="micro-batch 1, no checkpointing, 1F1B, ZeRO-1",
    ),
    "titan-a100": replace(_LLAMA, network="ib-200x8", network_printed=False),
    "titan-405b-128": replace(_LLAMA, network_printed=False),
    "titan": replace(_LLAMA, assumed=_CAPPED),
    "tut-off": System(vocab_size=50257),
    "llmc-124m-a800": replace(_FUSED, bias=True, assumed="a PCIe card of 300 W, taken as A100-80"),
    "nanogpt": replace(_FUSED, attention="plain", bias=True, assumed="the GPU, which is not printed"),
    "ds3-1t-800": System(network="ib-100x8", per_host=16, assumed="micro-batch 1, checkpointing of blocks"),
    "ds3-lowbw": System(
        network="eth-4",
        measured_network=True,
        per_host=4,
        vocab_size=50257,
        assumed="micro-batch 1, checkpointing of blocks",
    ),
}
"""Beginning of a row's id -> its system; the longest that fits counts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published figure in a form that the planner can compute."""

    setup: Setup
    machines: Machines
    assumed: str
    """Assumptions for the row; empty if it is complete."""


def system_of(row: Row) -> System | None:
    """Return the system of a row, by the longest matching prefix of its id; None if there is none.

    Args:
        row: the published row.
    """
    found = [beginning for beginning in SYSTEMS if row["id"].startswith(beginning)]
    return SYSTEMS[max(found, key=len)] if found else None


def build(row: Row, **changes: Any) -> Case:
    """Return the set-up of a row.

    Args:
        row: the published row.
        changes: fields of the set-up to replace, for a row with several figures.

    Raises:
        KeyError: the row lacks a value that cannot be assumed.
        ValueError: no set-up was published with the row.
    """
    system = system_of(row)
    if system is None:
        raise ValueError("no set-up is published with it")
    layout = row["layout"]
    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    gpus = layout["gpus"]
    dp = layout.get("dp", gpus // (tp * pp))
    micro = layout.get("micro_batch", layout.get("local_batch", 1))
    if row["id"].startswith("titan-405b"):
        micro = layout.get("micro_batch", 1)
    accumulation = layout.get("grad_accum") or max(1, layout.get("global_batch", micro * dp) // (dp * micro))
    if row["id"].startswith("llama3"):
        accumulation = layout["batch_per_dp"]
    schedule, chunks = _schedule(row, pp)
    setup = Setup(
        shape=shape_of(row, system),
        layout=Layout(dp=dp, tp=tp, pp=pp),
        zero_stage=_stage(layout, system),
        dtype=system.dtype if "V100" not in row["hardware"].get("gpu", "") else "float16",
        micro_size=micro,
        accumulation=accumulation,
        checkpointing=_checkpointing(row),
        attention=system.attention,
        sequence_parallel=bool(layout.get("sp")),
        schedule=schedule,
        chunks=chunks,
        cut=_even(row["model"]["layers"], pp * chunks),
        scattered_messages=system.scattered,
        wide_sums=system.wide_sums,
        overlap=system.overlap,
        listed_gathers=system.listed_gathers,
        optimizer=OptimizerConfig(name="sgd") if "SGD" in str(layout.get("optimizer")) else OptimizerConfig(),
        offload=_offload(layout),
    )
    machines = machines_of(row, system)
    assumed = [system.assumed] if system.assumed else []
    if machines.hosts > 1 and not system.network_printed:
        assumed.append(f"network {system.network}, which is not printed")
    return Case(setup=replace(setup, **changes), machines=machines, assumed="; ".join(assumed))


def machines_of(row: Row, system: System) -> Machines:
    """Return the machines of a row.

    Args:
        row: the published row.
        system: its system, for the network and the default number of GPUs in a host.

    Raises:
        KeyError: the row has no known GPU.
    """
    name = row["hardware"]["gpu"]
    gpus = row["layout"]["gpus"]
    per_host = min(row["hardware"].get("gpus_per_node", system.per_host), gpus)
    machines = Machines.parse(f"{per_host} {_GPUS[name]}")
    between = parse_link(system.network) if system.network else None
    in_host = parse_link("pcie3") if "PCIe" in name else machines.in_host
    return replace(machines, hosts=-(-gpus // per_host), between=between, in_host=in_host)


def shape_of(row: Row, system: System) -> ModelShape:
    """Return the model of a row, with heads of 64 elements by default.

    Args:
        row: the published row.
        system: its system.
    """
    model = row["model"]
    hidden = model["hidden"]
    return ModelShape(
        name=str(model.get("name", row["id"])),
        layers=model["layers"],
        hidden=hidden,
        heads=model.get("heads") or hidden // 64,
        kv_heads=model.get("kv_heads"),
        ffn_hidden=model.get("ffn") or 4 * hidden,
        vocab_size=model.get("vocab", system.vocab_size),
        sequence_length=model["seq"],
        gated=system.gated,
        position="rotary" if system.gated else "learned",
        norm="rms" if system.gated else "layer",
        tied=model.get("tied", not system.gated),
        biases=BIASES if system.bias else frozenset(),
        dropout=system.dropout,
    )


def _stage(layout: Row, system: System) -> int:
    stage = str(layout.get("zero", system.zero_stage))
    return int(stage[0]) if stage[0].isdigit() else 0


def _checkpointing(row: Row) -> Checkpointing:
    named = str(row["layout"].get("checkpointing", ""))
    if named.startswith("full"):
        return "block"
    if named.startswith("selective"):
        return "selective"
    return "block" if row["id"].startswith("ds3") else "none"


def _schedule(row: Row, pp: int) -> tuple[Literal["1f1b", "interleaved"], int]:
    chunks = row["layout"].get("interleave")
    if row["id"].startswith("sc21-t2"):
        chunks = None  # Table 2 names no schedule; table 1 does.
    elif row["id"].startswith("sc21") and row["model"]["layers"] % (2 * pp) == 0:
        chunks = 2
    elif row["id"].startswith("llama3"):
        chunks = 5
    return ("interleaved", chunks) if chunks and pp > 1 else ("1f1b", 1)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """Return the most even split, with the longer stages in the middle: these systems ignore the cost of the head."""
    each, over = divmod(layers, stages)
    begin = (stages - over) // 2
    return tuple(each + (begin <= stage < begin + over) for stage in range(stages))


def _offload(layout: Row) -> OffloadConfig:
    """Return which states a row offloads to host memory."""
    named = str(layout.get("offload", ""))
    return OffloadConfig(optimizer="host" if named else "none", parameters="host" if "params" in named else "none")
