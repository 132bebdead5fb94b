"""Cutting models into pipeline stages, and the orders in which ranks work on them. No processes."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedlab.config import ModelConfig
from speedlab.layout import layer_counts
from speedlab.models import GPT
from speedlab.parallel.pipeline import block_costs, cut_model, training_plan
from speedlab.parallel.pipeline.partition import _FAMILIES
from speedlab.parallel.pipeline.schedules import Action, ActionKind, forward_plan, with_transfers
from speedlab.parallel.zero import plan_units

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2)]


# ---- how many blocks each stage takes --------------------------------------------------------------------------------


def test_298_layers_on_50_stages() -> None:
    counts = layer_counts([1.0] * 298, 50)
    assert sum(counts) == 298
    assert len(counts) == 50
    assert set(counts) == {5, 6}


@pytest.mark.parametrize(
    ("costs", "first", "last"),
    [([3, 1, 4, 1, 5, 9, 2], 0, 0), ([1] * 6, 2, 3), ([1] * 5, 0, 40), ([0.1, 0.2, 0.3, 0.1, 0.7], 0.25, 0.5)],
)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_most_expensive_stage_is_the_cheapest_that_can_be(costs, first, last, stages) -> None:
    weights = [costs[0] + first, *costs[1:-1], costs[-1] + last]

    def dearest(counts: tuple[int, ...]) -> float:
        ends = [0, *itertools.accumulate(counts)]
        return max(sum(weights[low:high]) for low, high in itertools.pairwise(ends))

    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    all_counts = [tuple(b - a for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts]
    found = layer_counts(costs, stages, first=first, last=last)
    assert found in all_counts
    assert dearest(found) == pytest.approx(min(map(dearest, all_counts)))


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ValueError, match=r"3 blocks cannot be cut into 4 pipeline stages.*use at most 3"):
        layer_counts([1, 1, 1], 4)


# ---- stages ----------------------------------------------------------------------------------------------------------


def gpt(**fields: Any) -> GPT:
    shape = {"vocab_size": 29, "context": 7, "layers": 4, "hidden": 12, "heads": 2}
    return GPT(ModelConfig(**{**shape, **fields}))


def tiny(kind: str, *, tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 32}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    fields: dict[str, Any] = {"tie_word_embeddings": tied}
    if kind == "gpt2":
        fields |= {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
    else:
        fields |= {"intermediate_size": 24, "num_key_value_heads": 2}
    if kind in ("gemma", "gemma2", "qwen3"):
        fields |= {"head_dim": 4}
    if kind in ("gemma2", "qwen2", "smollm3"):
        kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
        fields |= {"layer_types": kinds, "sliding_window": 3, "use_sliding_window": True}
    config = transformers.AutoConfig.for_model(kind, vocab_size=29, **shape, **ids, **fields)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def cut(model: nn.Module, counts: tuple[int, ...]) -> list[Any]:
    return [cut_model(model, counts, stage) for stage in range(len(counts))]


def through(stages: list[Any], x: Tensor, targets: Tensor | None = None) -> Tensor:
    for stage in stages[:-1]:
        x = stage(x)
    return stages[-1](x, targets) if targets is not None else stages[-1](x)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


TOKENS = torch.randint(29, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fields", [{}, {"position": "learned", "norm": "layer", "bias": True}])
@pytest.mark.parametrize("counts", [(4,), (1, 3), (1, 2, 1)])
def test_gpt(tied, fields, counts) -> None:
    model = gpt(tied=tied, **fields)
    stages = cut(model, counts)
    loss, whole = through(stages, TOKENS, TOKENS.roll(1)), model(TOKENS, TOKENS.roll(1)).loss
    assert torch.equal(loss, whole)
    assert torch.equal(through(stages, TOKENS), model(TOKENS).logits)
    ours, theirs = gradients(model, loss), gradients(model, whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", _FAMILIES)
def test_families_of_transformers(kind, tied) -> None:
    """Every family on the list: the same bits as the whole model, loss and logits."""
    model = tiny(kind, tied=tied).eval()
    stages = cut(model, (1, 2, 1))
    targets = TOKENS.roll(1)
    whole = model(TOKENS, labels=targets, shift_labels=targets, use_cache=False)
    assert torch.equal(through(stages, TOKENS, targets), whole.loss)
    torch.testing.assert_close(whole.loss, nn.functional.cross_entropy(whole.logits.flatten(0, 1), targets.flatten()))
    assert torch.equal(through(stages, TOKENS), whole.logits)


@pytest.mark.parametrize("build", [gpt, lambda **kw: tiny("llama", **kw), lambda **kw: tiny("gpt2", **kw)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_has_its_own_parameters_under_their_whole_names(build, tied) -> None:
    with torch.device("meta"):
        model = build(tied=tied)
    before = {name: id(p) for name, p in model.named_parameters()}
    stages = cut(model, (1, 2, 1))
    held = [{name: id(p) for name, p in stage.named_parameters()} for stage in stages]
    assert {**held[0], **held[1], **held[2]} == before
    assert held[0].keys().isdisjoint(held[1])
    assert held[1].keys().isdisjoint(held[2])
    shared = held[0].keys() & held[2].keys()
    assert len(shared) == tied
    assert all("emb" in name or "wte" in name for name in shared)
    assert {name: id(p) for name, p in model.named_parameters()} == before, "the model itself has changed"
    blocks = [[name for name in stage if ".1." in name or ".2." in name] for stage in held]
    assert not blocks[0]
    assert blocks[1]
    assert not blocks[2]


def test_a_stage_of_one_block_still_has_it_as_a_unit() -> None:
    plans = plan_units(cut_model(gpt(), (1, 3), 0))
    assert [plan.name for plan in plans] == ["root", "blocks.0"]


def test_costs_are_parameters() -> None:
    with torch.device("meta"):
        model = gpt(tied=False, position="learned", norm="layer", bias=True)
    costs, first, last = block_costs(model)
    assert len(costs) == 4
    assert len(set(costs)) == 1
    assert first == 29 * 12 + 7 * 12
    assert last == 29 * 12 + 2 * 12
    assert first + last + sum(costs) == sum(p.numel() for p in model.parameters())


def test_models_that_cannot_be_cut() -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"Sequential is not known to be one list of blocks.*Use pp 1"):
        cut_model(nn.Sequential(nn.Linear(2, 2)), (1,), 0)
    t5 = transformers.AutoConfig.for_model("t5", vocab_size=29, d_model=16, num_layers=2, d_ff=8, num_heads=2, d_kv=8)
    with torch.device("meta"):
        with pytest.raises(ValueError, match=r"T5ForConditionalGeneration \(model type t5\) is not known"):
            block_costs(transformers.AutoModelForSeq2SeqLM.from_config(t5))
        base = tiny("llama", tied=False).model
    with pytest.raises(ValueError, match=r"LlamaModel.* has no head|LlamaModel .*is not known"):
        cut_model(base, (2, 2), 0)


def test_a_cut_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"cut 1 \+ 2 = 3 blocks, but GPT has 4"):
        cut_model(gpt(), (1, 2), 0)


# ---- orders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
def test_plans_do_everything_once_and_in_an_order_that_works(schedule, chunks, pp, micro_batches) -> None:
    if schedule in ("interleaved", "zero-bubble") and micro_batches % max(1, micro_batches // pp):
        pytest.skip("no such schedule")
    plan = training_plan(schedule, pp=pp, chunks=chunks, micro_batches=micro_batches)
    stages = range(pp * chunks)
    work = [action for actions in plan for action in actions]
    assert len(set(work)) == len(work)
    halves = (
        [ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT] if schedule == "zero-bubble" else [ActionKind.BACKWARD]
    )
    for kind in (ActionKind.FORWARD, *halves):
        assert {a[1:] for a in work if a.kind is kind} == set(itertools.product(stages, range(micro_batches)))
    for rank, actions in enumerate(plan):
        assert all(action.stage % pp == rank for action in actions)
    run(plan)


@pytest.mark.parametrize("chunks", [1, 3])
def test_forward_plans(chunks) -> None:
    plan = forward_plan(pp=3, chunks=chunks, micro_batches=4)
    assert sum(action.kind is ActionKind.FORWARD for actions in plan for action in actions) == 3 * chunks * 4
    run(plan)


def run(plan: list[list[Action]]) -> None:
    """Carry a plan out as over NCCL, the strictest transport there is: what passes between two ranks passes in one
    order on both sides, and not before both have come to it."""
    stages = 1 + max(action.stage for actions in plan for action in actions)
    between: dict[tuple[int, int], list[tuple]] = defaultdict(list)
    for rank, actions in enumerate(plan):
        for action in actions:
            if (message := message_of(action)) is not None:
                sender, receiver = message[1] % len(plan), message[2] % len(plan)
                assert rank in (sender, receiver)
                assert sender != receiver
                between[rank, sender + receiver - rank].append(message)
    assert all(messages == between[other, rank] for (rank, other), messages in between.items())

    reached: Counter[tuple] = Counter()
    done: set[Action] = set()

    def can(action: Action) -> bool:
        kind, stage, k = action
        if kind is ActionKind.FORWARD:
            return stage == 0 or reached["F", stage - 1, stage, k] == 2
        if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
            after = Action(ActionKind.FORWARD, stage, k) in done
            return after and (stage == stages - 1 or reached["B", stage + 1, stage, k] == 2)
        return kind is not ActionKind.BACKWARD_WEIGHT or Action(ActionKind.BACKWARD_INPUT, stage, k) in done

    queues = [list(actions) for actions in plan]
    while any(queues):
        able = [queue for queue in queues if queue and can(queue[0])]
        assert able, f"locked up: {[queue[:1] for queue in queues]}"
        for queue in able:
            action = queue.pop(0)
            done.add(action)
            if (message := message_of(action)) is not None:
                reached[message] += 1


def message_of(action: Action) -> tuple | None:
    """(what, from stage, to stage, micro-batch) of a send or a receive."""
    kind, stage, k = action
    return {
        ActionKind.SEND_ACTIVATION: ("F", stage, stage + 1, k),
        ActionKind.RECEIVE_ACTIVATION: ("F", stage - 1, stage, k),
        ActionKind.SEND_GRADIENT: ("B", stage, stage - 1, k),
        ActionKind.RECEIVE_GRADIENT: ("B", stage + 1, stage, k),
    }.get(kind)


def test_orders_that_lock_up_are_refused() -> None:
    backwards_first = [
        [Action(ActionKind.BACKWARD, 0, 0), Action(ActionKind.FORWARD, 0, 0)],
        [Action(ActionKind.FORWARD, 1, 0)],
    ]
    with pytest.raises(ValueError, match="lock up: nothing can begin of 0B0, 1F0"):
        with_transfers(backwards_first, stages=2)


def test_a_plan_prints() -> None:
    first = training_plan("1f1b", pp=2, chunks=1, micro_batches=1)[0]
    assert repr(first) == "[0F0, 0SEND_F0, 0RECV_B0, 0B0]"


def test_schedules_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="schedule 'fifo' is not one of gpipe, 1f1b, interleaved, zero-bubble"):
        training_plan("fifo", pp=2, chunks=1, micro_batches=2)
    with pytest.raises(ValueError, match="schedule 1f1b has one pipeline stage on each rank, not 2"):
        training_plan("1f1b", pp=2, chunks=2, micro_batches=2)
    with pytest.raises(ValueError, match=r"9 micro-batches on pp 4.*9 does not divide by 2; use accumulation 8 or 10"):
        training_plan("interleaved", pp=4, chunks=2, micro_batches=9)
    with pytest.raises(ValueError, match="0 micro-batches"):
        training_plan("gpipe", pp=4, chunks=1, micro_batches=0)
