"""Predict the time of a training step before it runs. No torch.

`predict_time` adds up:

1. Kernels of the slowest pipeline stage for one micro-batch: forward, backward, recomputation.
2. Its tensor-parallel sums: two of a micro-batch's hidden states in each block and direction, again for a recomputed
   block. They are not hidden.
3. All micro-batches of a step, and the pipeline's idle time while it fills and drains (`bubble_share`).
4. Gradients and parameters between data-parallel ranks, minus the part that forward and backward hide.
5. The update, on the device or on the host, and the wait for offloaded states (`planner.time.offload`).

The theory of `bubble_share`: all blocks take equally long, a backward takes twice a forward, messages take no time. A
rank's work is the same under every schedule; the total from the first forward to the last backward differs. Let p be
pipeline ranks, m micro-batches, v pipeline stages of each rank; a forward through one stage takes 1.

- gpipe, 1f1b (arXiv:1811.06965, arXiv:2104.04473): the pipeline fills and drains once. Of m + p - 1 turns a rank uses
  m: the share is (p - 1) / (m + p - 1).
- interleaved (arXiv:2104.04473, section 2.2): a stage, and so a turn, is 1/v of a rank's work: of v m + p - 1 turns a
  rank uses v m. Micro-batches run in groups of p; a smaller group waits until its first one returns.
- zero-bubble (ZB1P of arXiv:2401.10241): while the pipeline drains, a rank computes postponed gradients of weights. Of
  3 v m + p - 1 turns of a third only p - 1 are lost; more if m is less than p.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from speedlab.config.layout_rules import ring_needs
from speedlab.layout import LayoutError
from speedlab.planner.flops import Convention, token_flops
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.layer_shapes import block_cut, block_weights, check_shape, cross_attention
from speedlab.planner.memory.offload import zero_policy_of
from speedlab.planner.setup import Setup
from speedlab.planner.time.communication import Ring, Rings, Sending, rings
from speedlab.planner.time.efficiency import Efficiency
from speedlab.planner.time.kernels import KernelSeconds, Rates, block_pass, head_pass
from speedlab.planner.time.offload import unhidden_update, waited_seconds

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def bubble_share(schedule: str, *, pp: int, chunks: int = 1, micro_batches: int) -> float:
    """Return the idle share (0 to 1) of the ranks' time, from the first forward to the last backward.

    Args:
        schedule: gpipe, 1f1b, interleaved or zero-bubble.
        pp: pipeline ranks.
        chunks: pipeline stages of each rank; used only by interleaved and zero-bubble.
        micro_batches: micro-batches of a step.

    Raises:
        ValueError: the schedule is unknown, or a number is below 1.
    """
    if schedule not in _SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is not one of {', '.join(_SCHEDULES)}")
    if min(pp, chunks, micro_batches) < 1:
        raise ValueError(f"pp {pp}, chunks {chunks} and micro_batches {micro_batches} must each be at least 1")
    p, m, v = pp, micro_batches, chunks
    if schedule in ("gpipe", "1f1b"):
        return (p - 1) / (m + p - 1)
    if schedule == "interleaved":
        rounds = max(1, m // p)
        group = m / rounds
        return 1 - v * m / ((v * rounds - 1) * max(group, p) + group + p - 1)
    turns = 2 * m + p - 1 + max(m, p) + (v - 1) * (max(m, p) + max(2 * m, p))
    return 1 - 3 * v * m / turns


_SIGN_BYTES = 1 / 8 + 4 / 2**10
"""Bytes of a compressed momentum's element in a message: a sign, and its share of a chunk's scale (`comm.signs`)."""

_EXCHANGE_BYTES = 38
"""Memory traffic of a rank for each element of a compressed momentum, in bytes, beyond that of an update.

Packing (12), taking the mean and keeping the error (16), and, with two ranks, averaging, packing and measuring half of
it (20): 12 + 16 + 20 / 2.
"""

PARTS = {
    "forward": "forward kernels",
    "backward": "backward kernels",
    "recompute": "computing activations again",
    "logits": "logits and loss",
    "tensor parallel": "sums between tensor-parallel ranks",
    "context parallel": "keys, values and heads between context-parallel ranks",
    "pipeline messages": "activations between pipeline stages",
    "bubble": "pipeline ranks that stand still",
    "data parallel": "gradients and parameters between data-parallel ranks",
    "islands": "meetings of islands, by the step",
    "optimizer": "the update",
    "offload": "waiting for the host's memory or the disk",
    "engine": "the engine's own work around the kernels",
}
"""Part of a step -> its description."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted time of a step, and the resulting time and cost of a whole training."""

    setup: Setup
    machines: Machines
    parts: dict[str, float] = field(hash=False)
    """Seconds by part, in the order of `PARTS`; the sum is the step."""
    hidden_seconds: float
    """Data-parallel communication hidden by forward and backward."""
    caution: str
    """Parts of the estimate that were not validated; empty if all were."""

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together."""
        return self.setup.global_size * self.setup.shape.sequence_length / self.step_seconds

    def tflops(self, convention: Convention) -> float:
        """Return TFLOP/s of each device.

        Args:
            convention: which operations count, and whether recomputation does.
        """
        setup = self.setup
        # Selective recomputation of fused attention repeats no matrix products, so no FLOPs count.
        fused = setup.checkpointing == "selective" and setup.attention != "plain"
        again = "none" if fused else setup.checkpointing
        flops = token_flops(setup.shape, convention, again, attention_share=setup.attention_share)
        return flops * self.tokens_per_second / self.setup.layout.world_size / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs as a share of the device's peak, 0 to 1."""
        return self.tflops("model") * 1e12 / self.machines.device.peak(self.setup.dtype)

    def seconds_for(self, tokens: float) -> float:
        """Return the seconds of a training on `tokens` tokens."""
        return tokens / self.tokens_per_second

    def days(self, tokens: float) -> float:
        """Return the days of a training on `tokens` tokens."""
        return self.seconds_for(tokens) / 86400

    def device_hours(self, tokens: float) -> float:
        """Return the device-hours of a training on `tokens` tokens."""
        return self.seconds_for(tokens) / 3600 * self.setup.layout.world_size

    def cost(self, tokens: float) -> float | None:
        """Return the cost of a training on `tokens` tokens in the machines' currency; None without a price."""
        price = self.machines.price_per_device_hour
        return None if price is None else price * self.device_hours(tokens)

    @property
    def limit(self) -> str:
        """What limits the step, as text.

        That is the largest part besides forward and backward if it takes a fifth of the step, otherwise computing.
        """
        waits = {part: seconds for part, seconds in self.parts.items() if part not in ("forward", "backward")}
        part = max(waits, key=waits.__getitem__)
        share = waits[part] / self.step_seconds
        if share < 0.2:
            computing = (self.parts["forward"] + self.parts["backward"]) / self.step_seconds
            return f"computing ({computing:.0%}); then {PARTS[part]} ({share:.0%})"
        return f"{PARTS[part]} ({share:.0%} of the step)"


def predict_time(setup: Setup, machines: Machines, efficiency: Efficiency) -> StepTime:
    """Predict the time of one step.

    Args:
        setup: the training.
        machines: the hosts and their devices.
        efficiency: shares of the peak rates; with a calibration, the prediction is the calibration's.

    Raises:
        ValueError: the shape is invalid.
        LayoutError: the machines have too few devices.
    """
    check_shape(setup.shape)
    if setup.layout.world_size > machines.world_size:
        raise LayoutError(
            f"{setup.layout} = {setup.layout.world_size} ranks, but {machines} has {machines.world_size} devices; "
            "use a smaller layout or more hosts"
        )
    if efficiency.calibration is not None:
        # A calibration covers one host. With several, each device is modelled as a host (`Hardware.over`).
        return replace(efficiency.calibration.predict(setup, link=machines.between), machines=machines)
    rates = Rates.of(machines.device, efficiency, setup.dtype)
    groups = rings(setup.layout, machines, efficiency, secondary=setup.secondary_partition or 1)
    turns = _turns(setup, rates, groups, efficiency.overlap)
    turn = max(turns, key=lambda turn: sum(turn.values()))
    micro_batches = setup.accumulation
    parts = {part: micro_batches * seconds for part, seconds in turn.items()}
    share = bubble_share(setup.schedule, pp=setup.layout.pp, chunks=setup.chunks, micro_batches=micro_batches)
    # `share` is relative to the total with the bubble: total = work / (1 - share).
    parts["bubble"] = sum(parts.values()) * share / (1 - share)
    exposed, hidden = _data_parallel(setup, machines, groups, rates, turn, efficiency)
    parts["data parallel"] = exposed
    parts["islands"] = _meetings(setup, groups.islands, micro_batches * sum(turn.values()))
    owned = rank_parameters(setup) / (setup.layout.replicas if setup.zero_stage >= 1 else 1)
    computing = micro_batches * sum(turn[part] for part in ("forward", "backward", "recompute", "logits"))
    updating = _update(setup, machines, rates, efficiency, owned)
    parts["optimizer"] = unhidden_update(setup, machines, computing=computing, updating=updating)
    parts["offload"] = waited_seconds(
        setup, machines, efficiency, owned=owned, computing=computing, updating=parts["optimizer"]
    )
    return StepTime(
        setup=setup,
        machines=machines,
        parts={part: parts.get(part, 0.0) for part in PARTS},
        hidden_seconds=hidden,
        caution=_caution(setup, machines, efficiency),
    )


def balance(setup: Setup, machines: Machines, efficiency: Efficiency) -> float:
    """Return the mean time of a micro-batch over the pipeline ranks, divided by that of the slowest rank (0 to 1).

    Args:
        setup: the training.
        machines: the hosts and their devices.
        efficiency: shares of the peak rates.
    """
    rates = Rates.of(machines.device, efficiency, setup.dtype)
    groups = rings(setup.layout, machines, efficiency)
    turns = [sum(turn.values()) for turn in _turns(setup, rates, groups, efficiency.overlap)]
    return sum(turns) / len(turns) / max(turns)


def _turns(setup: Setup, rates: Rates, groups: Rings, overlap: float) -> list[dict[str, float]]:
    """Return seconds by part of one micro-batch for each pipeline rank, last rank first."""
    shape, layout = setup.shape, setup.layout
    block, head = block_pass(setup, rates), head_pass(setup, rates)
    cross = block_pass(setup, rates, cross=True) if shape.decoder_layers else block
    counts = blocks_by_rank(setup)
    decoders = shape.decoder_layers
    # Decoder layers are the last ones. In a model without them, all blocks are equal.
    after, turns = 0, []
    for rank, count in reversed(list(enumerate(counts))):
        of_decoder = min(count, max(0, decoders - after))
        after += count
        turns.append(_turn(setup, groups, block, count - of_decoder, cross, of_decoder, head, rank == layout.pp - 1))
    for axis, part in (("tp", "tensor parallel"), ("pp", "pipeline messages")):
        if axis in setup.overlap:
            for turn in turns:
                turn[part] *= 1 - overlap
    return turns


def _turn(
    setup: Setup,
    groups: Rings,
    block: KernelSeconds,
    plain: int,
    cross: KernelSeconds,
    crossed: int,
    head: KernelSeconds,
    last: bool,
) -> dict[str, float]:
    """Return seconds by part of one micro-batch on a pipeline rank.

    `plain` blocks have self-attention only, `crossed` blocks also attend to an encoder.
    """
    layout, shape = setup.layout, setup.shape
    hidden_bytes = setup.tokens * shape.hidden * (4 if setup.dtype == "float32" else 2)
    again = setup.checkpointing == "block"
    forward = plain * block.forward + crossed * cross.forward
    some = plain * block.again + crossed * cross.again
    # A cross-attention adds a third sum to a block. Recomputation repeats the sums of forward.
    sums = (2 * plain + 3 * crossed) * (3 if again else 2)
    boundary = hidden_bytes / layout.tp if setup.sequence_parallel or setup.scattered_messages else hidden_bytes
    gathered = (plain + crossed) * groups.tp.gather(hidden_bytes) if setup.cuts_inputs else 0.0
    positions = _between_positions(setup, groups.cp, hidden_bytes / layout.tp, again=again)
    # An activation forward and its gradient backward, for each stage of the rank.
    messages = 2 * setup.chunks if setup.schedule in ("interleaved", "zero-bubble") else 2
    return {
        "forward": forward,
        "backward": plain * block.backward + crossed * cross.backward,
        "recompute": forward if again else some if setup.checkpointing == "selective" else 0.0,
        "logits": head.forward + head.backward if last else 0.0,
        "tensor parallel": (sums + (1 if last else 0)) * groups.tp.all_reduce(hidden_bytes) + gathered,
        "context parallel": (plain + crossed) * positions,
        "pipeline messages": messages * groups.pp.send(boundary),
    }


def _between_positions(setup: Setup, cp: Ring, nbytes: float, *, again: bool) -> float:
    """Return the seconds of communication for a block's attention between context-parallel ranks.

    Nothing of it is assumed hidden. `nbytes`: bytes of a rank's queries.
    """
    if setup.layout.cp == 1:
        return 0.0
    shared = setup.heads_shared
    turns, wide = setup.layout.cp // shared - 1, 4 / (4 if setup.dtype == "float32" else 2)
    # All-to-all of queries, keys, values and outputs: before and after attention.
    heads = replace(cp, ranks=shared).gather(4 * nbytes)
    if setup.attention == "sparse":
        forward = sum(cp.send(2 * share * nbytes) for share in _sent_shares(setup, turns + 1))
        backward = 2 * forward  # Keys and values again, then their gradients directly to the owner.
    else:
        forward = turns * cp.send(2 * nbytes)
        # Keys and values again, with the sums of their gradients, which need one turn more.
        backward = forward + (turns + 1) * cp.send(2 * wide * nbytes) if turns else 0.0
    return (2 if again else 1) * (heads + forward) + heads + backward


def _sent_shares(setup: Setup, ring: int) -> list[float]:
    """Return for each turn of the ring the share of a rank's keys that is sent: the most that any rank needs."""
    if ring == 1:
        return []
    multiple = 2 * ring * setup.pattern.block
    needs = ring_needs(setup.pattern, -(-setup.shape.sequence_length // multiple) * multiple, ring)
    most = [max(len(needs.needed[rank][(rank - k) % ring]) for rank in range(ring)) for k in needs.turns]
    return [count / len(needs.blocks[0]) for count in most]


def _data_parallel(
    setup: Setup, machines: Machines, groups: Rings, rates: Rates, turn: dict[str, float], efficiency: Efficiency
) -> tuple[float, float]:
    """Return (exposed, hidden) seconds of a step between data-parallel ranks."""
    dp = groups.dp
    if setup.zero_stage == 3 and setup.listed_gathers:
        return _listed(setup, dp, efficiency), 0.0
    element = 4 if setup.dtype == "float32" else 2
    held = rank_parameters(setup)
    # A single micro-batch needs no sum, so its gradients stay in the compute dtype.
    summed = 4 if setup.wide_sums and setup.accumulation > 1 else element
    pipeline = setup.layout.pp > 1
    scatters = 1 if setup.zero_stage < 2 or pipeline else setup.accumulation
    # One unit for each block, and the root.
    units = max(blocks_by_rank(setup)) + 1
    mapped = machines.device.on_host and not dp.crosses_hosts and zero_policy_of(setup).shards_stay
    sending = Sending(
        setup=setup, groups=groups, memory_bytes=rates.memory_bytes, elements=held, units=units, mapped=mapped
    )
    if setup.optimizer.sums_itself:  # In the update, after all backwards: one message out, one back.
        return 2 * dp.gather(held * _SIGN_BYTES) / setup.optimizer.exchange_every, 0.0
    if setup.zero_stage == 0:
        gradients, parameters = dp.all_reduce(held * summed), 0.0
    else:
        gradients, parameters = scatters * sending.gradients(summed), sending.parameters()
    computing = turn["forward"] + turn["backward"] + turn["recompute"] + turn["logits"]
    if setup.zero_stage < 3:
        # Backward of the last micro-batch hides gradients (with stage 2, of every one); parameters are exposed.
        window = scatters * (turn["backward"] + turn["recompute"])
        hidden = efficiency.overlap * min(gradients, window)
        if "dp" in setup.overlap:
            hidden += efficiency.overlap * min(parameters, turn["forward"])
        return gradients + parameters - hidden, hidden
    passes = setup.accumulation
    total = gradients + parameters + (2 * passes - 1) * sending.parameters(again=True)
    hidden = efficiency.overlap * min(total, passes * computing) if _fits_ahead(setup, machines) else 0.0
    return total - hidden, hidden


def _meetings(setup: Setup, islands: Ring, computing: float) -> float:
    """Return the mean seconds that a step waits for the synchronisation of islands.

    Each rank sends its partition to its peers in other islands, in float32 or compressed; all ranks get all partitions.
    `computing`: seconds of a step; some steps hide a delayed synchronisation.
    """
    outer = setup.outer
    held = rank_parameters(setup) / setup.layout.replicas / outer.fragments
    if outer.compression == "none":
        seconds = islands.all_reduce(4 * held)
    else:
        code = _SIGN_BYTES if outer.compression == "signs" else 8 * outer.topk_share
        seconds = islands.gather(islands.ranks * code * held)
    return outer.fragments * max(0.0, seconds - outer.delay_steps * computing) / outer.every_steps


def _listed(setup: Setup, dp: Ring, efficiency: Efficiency) -> float:
    """Return the seconds of a step of ZeRO-3 that gathers lists of tensors (`Setup.listed_gathers`).

    Each matrix is a separate collective, and a kernel copies each rank's part into or out of the list.
    """
    element = 4 if setup.dtype == "float32" else 2
    matrices = 5 if setup.shape.gated else 4
    count = matrices * max(blocks_by_rank(setup)) + 1
    each = dp.gather(rank_parameters(setup) * element / count) + dp.ranks * efficiency.kernel_seconds
    # Gather for forward, gather for backward, reduce; and gather again to recompute a block.
    times = 4 if setup.checkpointing == "block" else 3
    return setup.accumulation * times * count * each


def _fits_ahead(setup: Setup, machines: Machines) -> bool:
    """Return whether the next unit can be gathered while one is used: the device must hold both, and a gradient."""
    element = 4 if setup.dtype == "float32" else 2
    unit = rank_parameters(setup) / max(blocks_by_rank(setup)) * element
    return 3 * unit <= machines.device.memory_bytes


def _update(setup: Setup, machines: Machines, rates: Rates, efficiency: Efficiency, owned: float) -> float:
    """Return the seconds of the update of `owned` parameters.

    The device computes it, or, if states are offloaded from a GPU, the host's processors, which its ranks share.
    """
    if setup.offload.optimizer != "none" and not machines.device.on_host:
        return owned * min(machines.per_host, setup.layout.world_size) * efficiency.host_adam_seconds
    element = rates.element_bytes
    # Master weights and moments are read and written, gradients read twice (the norm, the update), parameters written.
    moved = owned * (8 * (1 + setup.optimizer.moments) + 2 * element + (element if element < 4 else 0))
    # 8-bit states are decoded before and encoded after: twice in float32 and twice as codes.
    moved += owned * (8 + 2) * (setup.optimizer.moments if setup.moments == "8bit" else 0)
    moved += owned * (8 + 2) * (setup.dtype == "bfloat16" and setup.masters == "none")
    if setup.optimizer.looks_at_parameters:  # LAMB-like norms read masters and moments once more.
        moved += owned * 4 * (1 + setup.optimizer.moments)
    if setup.optimizer.sums_itself and setup.layout.replicas > 1:
        moved += rank_parameters(setup) * _EXCHANGE_BYTES
    return moved / rates.memory_bytes


def blocks_by_rank(setup: Setup) -> list[int]:
    """Return the number of blocks of each pipeline rank."""
    counts = block_cut(setup)
    return [sum(counts[rank :: setup.layout.pp]) for rank in range(setup.layout.pp)]


def rank_parameters(setup: Setup) -> float:
    """Return the parameters of the heaviest pipeline rank, on one tensor-parallel rank.

    Args:
        setup: the training. The number is before ZeRO partitions the parameters, and need not be whole.
    """
    shape, layout = setup.shape, setup.layout
    weights = block_weights(shape)
    block = weights.matrices / layout.tp + weights.rest
    cross = cross_attention(shape) / layout.tp * shape.decoder_layers / shape.depth
    table = shape.vocab_size * shape.hidden / layout.tp
    counts = blocks_by_rank(setup)
    tables = [0] * layout.pp
    tables[0] += 1
    tables[-1] += 0 if shape.tied and layout.pp == 1 else 1
    return max(count * (block + cross) + own * table for count, own in zip(counts, tables, strict=True))


def _caution(setup: Setup, machines: Machines, efficiency: Efficiency) -> str:
    """Return what the published runs and own measurements do not cover."""
    doubts = []
    if not efficiency.validated:
        doubts.append(f"no published run of {machines.device.name} was compared; its efficiency is taken from H100")
    if setup.attention == "sparse" and setup.layout.cp > setup.heads_shared and not machines.device.on_host:
        doubts.append("sparse attention in a ring runs on CPUs only: let all cp ranks share heads")
    if setup.attention == "sparse":
        doubts.append("sparse attention is timed by its share of blocks, each at the speed of dense attention's")
    if setup.layout.cp > 1:
        doubts.append("context parallelism was not compared")
    if setup.layout.islands > 1:
        doubts.append("islands were not compared")
    if setup.shape.decoder_layers:
        doubts.append("no encoder-decoder was compared")
    if setup.zero_stage == 3 and rings(setup.layout, machines, efficiency).dp.crosses_hosts:
        doubts.append("published runs of ZeRO-3 between hosts were missed by up to 23%")
    if setup.optimizer.sums_itself:
        late = ", in the mean between two of the last exchanges" if setup.optimizer.exchange_every > 1 else ""
        doubts.append(
            f"steps with compressed momenta were not compared; the time is one of a step after the warm-up{late}"
        )
    if setup.zero.switches:
        doubts.append("steps whose parameters or gradients are quantised were not compared")
    if setup.optimizer.looks_at_parameters:
        doubts.append("updates that look at whole parameters were not compared")
    if setup.offload.delayed_update is not None:
        doubts.append("updates that are late by a step were not compared")
    if "disk" in (setup.offload.optimizer, setup.offload.parameters):
        known = "" if machines.host.disk_measured else ", and this disk was not measured"
        doubts.append(f"small trainings with states away on one machine were missed by up to 35%{known}")
    elif setup.offload.optimizer != "none":
        doubts.append("published runs with offload were missed by up to 30%")
    return "; ".join(doubts)
