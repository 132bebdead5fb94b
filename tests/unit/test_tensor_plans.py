"""Plans of tensor parallelism: found, carried by both generations of Hugging Face's interface, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from speedlab.config import MODEL_PRESETS, ModelConfig
from speedlab.layout import LayoutError
from speedlab.models import GPT
from speedlab.parallel.pipeline import cut_model
from speedlab.parallel.tensor import PlanError, TensorParallel, find_plan, within


def group(size: int, index: int = 0) -> Any:
    """All that planning asks of a group."""
    return SimpleNamespace(size=size, index=index)


def gpt(**fields: Any) -> GPT:
    shape = {"layers": 2, "hidden": 24, "heads": 6, "ffn_hidden": 40, "vocab_size": 61, "context": 16}
    with torch.device("meta"):
        return GPT(ModelConfig.model_validate({**shape, **fields}))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8)


class Forgetful(nn.Module):
    """Its plan does not tell whether its norms see whole values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        for layer in self.layers:
            layer.add_module("norm", nn.LayerNorm(20))
        self._tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.table = nn.Embedding(30, 8)


MLP = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


# ---- finding ---------------------------------------------------------------------------------------------------------


def test_the_gpts_own_plan_leaves_norms_positions_and_row_biases_whole() -> None:
    model = gpt(position="learned", bias=True, norm="layer", tied=False)
    tensor = TensorParallel(model, group(2, 1))
    whole = {name for name, _ in model.named_parameters()} - tensor.parts.keys()
    assert {name.replace("blocks.1", "blocks.0") for name in whole} == {
        "positions.weight",
        "norm.weight",
        "norm.bias",
        *(f"blocks.0.{norm}.{key}" for norm in ("attention_norm", "mlp_norm") for key in ("weight", "bias")),
        "blocks.0.attention.out.bias",
        "blocks.0.mlp.down.bias",
    }
    assert tensor.parts["blocks.1.attention.qkv.weight"].ranges == ((12, 24), (36, 48), (60, 72))
    assert tensor.parts["blocks.1.attention.out.weight"].dim == 1
    assert tensor.parts["embedding.weight"].ranges == ((30, 61),)
    assert {name for name, _ in model.named_parameters() if tensor.first_holder(name) != tensor.group.index} == whole
    assert tensor.partial == frozenset()
    assert TensorParallel(model, group(2, 1), sequence=True).partial == whole - {"positions.weight"}


def test_parameters_on_meta_are_cut_to_their_shape() -> None:
    model = gpt()
    tensor = TensorParallel(model, group(3, 2))
    tensor.cut(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        if name in tensor.parts:
            assert parameter.shape == tensor.parts[name].own_shape
            assert parameter.is_meta


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_every_preset_can_be_cut(preset) -> None:
    """GPT-2's 50,257 tokens too."""
    with torch.device("meta"):
        model = GPT(ModelConfig.model_validate({"preset": preset}))
    size = 5 if model.config.heads == 25 else 2
    parts = [TensorParallel(model, group(size, index)).parts for index in range(size)]
    rows = [part["embedding.weight"].own_shape[0] for part in parts]
    assert sum(rows) == model.config.vocab_size
    assert max(rows) - min(rows) <= 1


def test_one_rank_cuts_nothing() -> None:
    tensor = TensorParallel(nn.Linear(3, 3), group(1))
    assert not tensor.parts
    assert tensor.first_holder("weight") == 0


class Base(Stack):
    """A Hugging Face model without heads, whose configuration carries a plan."""

    config = SimpleNamespace(base_model_tp_plan=MLP)

    @property
    def base_model(self) -> nn.Module:
        return self


class WithHead(nn.Module):
    """As transformers 4 has it: the class knows of the head, the configuration of the rest, and of the embedding, whose
    weights the head shares, nobody."""

    _tp_plan = {"head": "colwise_rep"}  # noqa: RUF012  # as theirs

    def __init__(self) -> None:
        super().__init__()
        self.model = Base()
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.model.table.weight

    @property
    def base_model(self) -> nn.Module:
        return self.model


def test_plans_of_transformers_4() -> None:
    model = WithHead()
    assert find_plan(model) == {"head": "colwise_rep", **{f"model.{key}": style for key, style in MLP.items()}}
    tensor = TensorParallel(model, group(2))
    assert tensor.parts["model.table.weight"].ranges == ((0, 15),)
    tensor.attach()
    assert "forward" in model.model.table.__dict__
    tensor.detach()
    assert "forward" not in model.model.table.__dict__


def test_plans_of_transformers_5() -> None:
    """There an instance knows of all its layers."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=30))
    plan = find_plan(model)
    assert plan["lm_head"] in ("colwise_gather_output", "colwise_rep")
    assert plan["model.layers.*.self_attn.o_proj"] == "rowwise"


def test_a_stage_of_a_model_has_its_part_of_the_plan() -> None:
    """A pipeline stage without embedding and head: the blocks of the last but one stage."""
    stage = cut_model(gpt(tied=False, layers=3), (1, 1, 1), 1)
    tensor = TensorParallel(stage, group(2), sequence=True)
    assert {name.split(".")[1] for name in tensor.parts} == {"1"}
    assert len(tensor.parts) == 4
    assert len(tensor.partial) == 2
    assert within({"head": "colwise_rep", "blocks.*.mlp.up": "colwise"}, stage) == {"blocks.*.mlp.up": "colwise"}


# ---- refusing --------------------------------------------------------------------------------------------------------


class NoName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 4)


def llama(**fields: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": 30}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **fields}))


REFUSALS: dict[str, tuple[Any, int, dict[str, Any], type[ValueError], str]] = {
    "heads": (gpt, 4, {}, LayoutError, r"blocks\.0\.attention: tp 4: 6 heads do not divide by 4; 1, 2, 3 or 6 do"),
    "key and value heads": (
        lambda: llama(num_attention_heads=6, num_key_value_heads=3),
        2,
        {},
        LayoutError,
        r"k_proj: tp 2: 3 key and value heads can neither be divided by 2 nor shared .* tp 1, 3 or 6 would work",
    ),
    "attention dropout": (
        lambda: llama(num_attention_heads=4, attention_dropout=0.25),
        2,
        {},
        PlanError,
        "self_attn: attention probabilities are dropped with probability 0.25.*set attention_dropout of the model's",
    ),
    "no plan": (NoName, 2, {}, PlanError, "NoName carries no plan .* none is built in for it; give one as tp_plan="),
    "experts": (
        Stack,
        2,
        {"plan": {"layers.*.up": "grouped_gemm"}},
        PlanError,
        r"'layers\.\*\.up' asks for 'grouped_gemm', which is not built",
    ),
    "sequence in a plan": (Stack, 2, {"plan": {"table": "sequence_parallel"}}, PlanError, "GPT of this package only"),
    "a name that is not there": (
        Stack,
        2,
        {"plan": {"layers.*.upp": "colwise"}},
        PlanError,
        r"'layers\.\*\.upp' names no module of Stack; nearest: 'layers\.\*\.up'",
    ),
    "a parameter": (
        Stack,
        2,
        {"plan": {"layers.*.up.weight": "colwise"}},
        PlanError,
        r"'layers\.\*\.up\.weight' is a parameter, and layers are what is cut .*; nearest: 'layers\.\*\.up'",
    ),
    "a carried plan that says nothing of a layer": (
        Forgetful,
        2,
        {},
        PlanError,
        r"the plan of Forgetful says nothing of layers\.0\.norm\.weight, which is next to layers that are cut; give "
        r"tp_plan=\{\*\*model\._tp_plan, 'layers\.0\.norm': …\}, 'replicated' where",
    ),
    "a module that is no layer": (NoName, 2, {"plan": {"layer": "colwise"}}, PlanError, "layer is a Bilinear"),
    "sequence elsewhere": (Stack, 2, {"plan": MLP, "sequence": True}, PlanError, "not for Stack; set sequence: false"),
    "sequence with another plan": (
        gpt,
        2,
        {"plan": {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}, "sequence": True},
        PlanError,
        "the plan leaves embedding whole",
    ),
    "packed queries": (
        gpt,
        2,
        {"plan": {"blocks.*.attention.qkv": "colwise"}},
        PlanError,
        "packs three matrices; cut it as packed_colwise_3",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_cut_is_refused(case) -> None:
    build, size, arguments, error, message = REFUSALS[case]
    model = build()
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(error, match=message):
        TensorParallel(model, group(size), **arguments)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_more_ranks_than_outputs_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"layers\.0\.up\.weight: tp 21: its 20 elements along dimension 0 do not"):
        TensorParallel(Stack(), group(21, 20), plan=MLP)


def test_an_embedding_that_needs_its_whole_table_is_refused() -> None:
    model = Stack()
    model.table = nn.Embedding(30, 8, max_norm=1.0)
    with pytest.raises(PlanError, match=r"table: an embedding with max_norm=1\.0 is not cut"):
        TensorParallel(model, group(2), plan={"table": "embedding_rowwise"})


def test_shared_parameters_are_cut_alike_or_refused() -> None:
    model = Stack()
    model.layers[1].up.weight = model.layers[0].down.weight = nn.Parameter(torch.zeros(20, 8))
    with pytest.raises(PlanError, match=r"layers\.0\.down\.weight is shared by several layers and cut along"):
        TensorParallel(model, group(2), plan=MLP)
