"""Copies of a module that an engine drives: an average of it, a teacher. They are modules of their own."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaConfig, LlamaForCausalLM

import speedlab
from ranks import models
from ranks.loops import Case, engine_for, engine_step, sgd
from ranks.pool import Pool, RanksFailed

CASES = [
    Case(stage=0),
    Case(stage=1, checkpointing="block"),
    Case(stage=2, checkpointing="block", partition_inputs=True),
]


@torch.no_grad()
def look(module: Any) -> Tensor:
    return module(*CASES[0].batch(9, 0))


def copied(case: Case) -> tuple[Tensor, Tensor, list[Tensor], dict[str, Tensor]]:
    """Looks through a copy that was taken after a step and through an average of two steps; what the copy has, and the
    model then, which trained on."""
    with engine_for(case) as engine:
        engine_step(engine, case, 0)
        whole, twin, average = engine.state_dict(), copy.deepcopy(engine.module), AveragedModel(engine.module)
        average.update_parameters(engine.module)
        engine_step(engine, case, 1)
        average.update_parameters(engine.module)
        seen, averaged = None, None
        if dist.get_rank() == 0:  # No rank waits for another one.
            seen, averaged = look(twin), look(average)
            twin(*case.batch(9, 0)).backward()
        engine_step(engine, case, 2)
        assert {type(each) for each in twin.parameters()} == {nn.Parameter}
        return seen, averaged, [each.detach() for each in twin.parameters()], whole


@pytest.mark.parametrize("case", CASES, ids=["0", "1, checkpointing", "2, partitioned inputs"])
def test_a_copy_is_a_module_of_its_own(two: Pool, case: Case) -> None:
    plain = models.transformer()
    seen, averaged, values, whole = two.run(copied, case, timeout=30)[0]
    assert list(whole) == list(plain.state_dict())
    plain.load_state_dict(whole)
    torch.testing.assert_close(values, [each.detach() for each in plain.parameters()], atol=0, rtol=0)
    torch.testing.assert_close(seen, look(plain), atol=1e-6, rtol=0)
    assert 1e-5 < abs(averaged - seen) < 1


def in_a_file(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """A look through what `torch.save` has written of the module itself, and its values; it trains on by itself."""
    file = io.BytesIO()
    with engine_for(case) as engine:
        engine_step(engine, case, 0)
        whole = engine.state_dict()
        torch.save(engine.module, file)
        engine_step(engine, case, 1)
        read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        seen = look(read) if dist.get_rank() == 0 else None
        assert all(each.equal(whole[name]) for name, each in read.state_dict().items())
        if dist.get_rank() == 0:
            read(*case.batch(9, 0)).backward()
        assert {type(each) for each in read.parameters()} == {nn.Parameter}
        copy.deepcopy(read)
        return seen, whole


@pytest.mark.parametrize("case", CASES, ids=["0", "1, checkpointing", "2, partitioned inputs"])
def test_a_module_in_a_file_is_one_of_its_own(two: Pool, case: Case) -> None:
    plain = models.transformer()
    seen, whole = two.run(in_a_file, case, timeout=30)[0]
    plain.load_state_dict(whole)
    torch.testing.assert_close(seen, look(plain), atol=1e-6, rtol=0)


def copied_where_it_is_not(how: str) -> None:
    case = Case(stage=3, bucket_bytes=1)
    with engine_for(case) as engine:
        engine_step(engine, case, 0)
        if how == "copy":
            copy.deepcopy(engine.module)
        elif how == "average":
            AveragedModel(engine.module)
        elif how == "module":
            torch.save(engine.module, io.BytesIO())
        else:
            torch.save(dict(engine.module.named_parameters()), io.BytesIO())


@pytest.mark.parametrize("how", ["copy", "average", "module", "file"])
def test_parameters_that_are_not_here_cannot_be_copied(two: Pool, how: str) -> None:
    """They would be copied as NaN, and a person would find out much later."""
    with pytest.raises(RanksFailed, match=r"partitioned \(ZeRO stage 3\).*engine.state_dict\(\)"):
        two.run(copied_where_it_is_not, how, timeout=30)


def copied_where_it_is_cut() -> None:
    config = {"parallel": {"tp": 2}, "batch": {"micro_size": 2}}
    engine = speedlab.initialize(model=hugging_face(), optimizer=sgd, config=config)[0]
    try:
        copy.deepcopy(engine.module)
    finally:
        engine.destroy(keep_parameters=False)


def hugging_face() -> nn.Module:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=48, **sizes))


def test_a_model_that_is_cut_over_ranks_cannot_be_copied(two: Pool) -> None:
    """Its layers have forwards that know the values that they were made with."""
    with pytest.raises(RanksFailed, match=r"copy\.deepcopy: .* \(parallel\.tp, parallel\.cp\)"):
        two.run(copied_where_it_is_cut, timeout=60)


def wrapped_again() -> list[str]:
    """What blocks compute with: an engine's wrapper, though one of an engine that was dropped is there still."""
    model, case = models.transformer(), Case(stage=1, checkpointing="block")
    engine = speedlab.initialize(model=model, optimizer=sgd, config=case.config())[0]
    first = model.blocks[0].forward._forward
    del engine
    gc.collect()
    with engine_for(case, model=model) as engine:
        engine_step(engine, case, 0)
        return ["another" if model.blocks[0].forward._forward is not first else "the first one's"]


def test_an_engine_behind_one_that_was_dropped_wraps_anew(two: Pool) -> None:
    assert two.run(wrapped_again, timeout=30) == [["another"]] * 2


def copied_before_a_reshape() -> bool:
    case = Case(stage=2, bucket_bytes=1)
    with engine_for(case) as engine:
        twin = copy.deepcopy(engine.module)
        engine.reshape(zero=3)
        engine_step(engine, case, 0)
        if dist.get_rank() == 0:
            twin(*case.batch(9, 0)).backward()
            twin.blocks[0].up(torch.zeros(1, models.WIDTH))
            twin.state_dict()
        engine_step(engine, case, 1)
        gathered = [speedlab.gather(each) for each in engine.module.parameters()]
    return all(bool(each.isfinite().all()) for each in [*gathered, *twin.parameters()])


def test_a_copy_gathers_nothing(two: Pool) -> None:
    assert two.run(copied_before_a_reshape, timeout=30) == [True, True]
