"""Models given as callables have, bit for bit, the values of `torch.manual_seed(seed); factory()` in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import speedlab
from ranks import architectures
from ranks.loops import Case, problems, sgd, train_engine, train_plain
from ranks.pool import Pool
from ranks.test_peers import HF_FLOAT32, hugging_face_loss, units_of
from speedlab.parallel import construct, construction

CPU = torch.device("cpu")
SEED = 7


def plain(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        return factory()


def constructed(factory: Callable[[], nn.Module], *, least: int = 256, budget: int = 0) -> tuple[nn.Module, int]:
    """The model with all of its values, and how many parameters were freed meanwhile."""
    with mock.patch.multiple(construction, LEAST_BYTES=least, BUDGET_BYTES=budget):
        model, made = construct(factory, seed=SEED, device=CPU)
    freed = [parameter for parameter in model.parameters() if parameter.is_meta]
    for parameter in freed:
        assert made is not None
        value = made.value_of(parameter)
        assert value is not None
        construction.give_value(parameter, value)
    return model, len(freed)


def differences(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """Names of parameters and buffers that are not equal to the bit."""
    named = [{**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (ours, theirs)]
    assert list(named[0]) == list(named[1])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    return [name for name, value in named[1].items() if not same(named[0][name], value)]


def same(ours: Tensor, theirs: Tensor) -> bool:
    alike = (ours.dtype, ours.stride(), ours.requires_grad, type(ours)) == (
        *(theirs.dtype, theirs.stride(), theirs.requires_grad, type(theirs)),
    )
    return alike and torch.equal(ours, theirs)


# ---- constructors of one's own ---------------------------------------------------------------------------------------


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def initialised() -> nn.Module:
    layers = [nn.Linear(32, 32) for _ in range(6)]
    nn.init.orthogonal_(layers[0].weight)
    nn.init.trunc_normal_(layers[1].weight, std=0.02, a=-0.03, b=0.03)
    nn.init.xavier_normal_(layers[2].weight, generator=torch.Generator().manual_seed(4))
    nn.init.sparse_(layers[3].weight, 0.5)
    with torch.no_grad():
        layers[4].weight.copy_(torch.cat([layers[0].weight, 2 * layers[1].weight])[:32].flip(0))
        layers[4].weight[3].zero_()
        for row in range(32):
            layers[5].weight[row].mul_(row)
    return nn.ModuleList(layers)


def cast_and_copied() -> nn.Module:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    convolution: Any = nn.Conv2d(8, 8, 3)
    return nn.ModuleList([encoder, nn.Linear(32, 32).bfloat16(), convolution.to(memory_format=torch.channels_last)])


def depends_on_values() -> nn.Module:
    rates = [float(rate) for rate in torch.linspace(0, 1, 200)]
    weight = torch.randn(32, 32)
    size = 16 if weight.sum().item() > 0 else 48
    layer = nn.Linear(size, 32)
    layer.register_buffer("rates", torch.tensor(rates))
    return layer


def tied() -> nn.Module:
    first, second = nn.Embedding(32, 32, padding_idx=3), nn.Linear(32, 32, bias=False)
    second.weight = first.weight
    return nn.ModuleList([first, second])


def dtype_of_the_moment() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Linear(32, 32)
    finally:
        torch.set_default_dtype(torch.float32)


def from_numpy() -> nn.Module:
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    with torch.no_grad():
        first.weight.copy_(torch.from_numpy(np.arange(1024, dtype=np.float32).reshape(32, 32)))
    second.weight.data.numpy()[:] = 3
    return nn.ModuleList([first, second, nn.Linear(32, 32)])


def reseeded() -> nn.Module:
    first = nn.Linear(32, 32)
    torch.manual_seed(99)
    return nn.ModuleList([first, nn.Linear(32, 32), nn.LSTM(32, 32)])


def parametrized() -> nn.Module:
    from torch.nn.utils import parametrizations

    return nn.ModuleList(
        [parametrizations.weight_norm(nn.Linear(32, 32)), parametrizations.spectral_norm(nn.Linear(32, 32))]
    )


def viewed_elsewhere() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.window = layer.weight.detach()[:4]  # pyright: ignore[reportAttributeAccessIssue]  # a view that nobody registers
    return nn.ModuleList([layer, nn.Linear(32, 32)])


OWN = {
    each.__name__: each
    for each in (
        *(linears, initialised, cast_and_copied, depends_on_values, tied, dtype_of_the_moment, from_numpy, reseeded),
        *(parametrized, viewed_elsewhere),
    )
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("budget", [0, 12_000])
def test_values_are_those_of_the_plain_construction(name: str, budget: int) -> None:
    state = torch.get_rng_state()
    ours, freed = constructed(OWN[name], budget=budget)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state stays"
    assert differences(ours, plain(OWN[name])) == []
    assert freed > 0 or name in ("depends_on_values", "dtype_of_the_moment") or budget, "nothing was freed"


def test_a_view_that_is_not_registered_keeps_its_values() -> None:
    ours, theirs = constructed(viewed_elsewhere)[0], plain(viewed_elsewhere)
    assert torch.equal(ours.get_submodule("0").window, theirs.get_submodule("0").window)  # type: ignore[arg-type]  # a tensor
    assert ours.get_submodule("0").window.data_ptr() == ours.get_submodule("0").weight.data_ptr()  # type: ignore[union-attr]  # as above


def test_what_is_freed_is_the_same_object_afterwards() -> None:
    """Lists, closures and optimizers of the constructor's own refer to the model's parameters."""
    kept: list[nn.Parameter] = []

    def factory() -> nn.Module:
        model = linears()
        kept.extend(model.parameters())
        return model

    model, freed = constructed(factory)
    assert freed
    assert [id(p) for p in kept] == [id(p) for p in model.parameters()]
    assert not any(p.is_meta for p in kept)


def test_small_models_are_built_whole() -> None:
    _, made = construct(linears, seed=SEED, device=CPU)
    assert made is None


def test_a_constructor_that_raises_leaves_tensors_with_values() -> None:
    kept: list[nn.Module] = []

    def factory() -> nn.Module:
        kept.append(linears())
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), mock.patch.multiple(construction, LEAST_BYTES=256, BUDGET_BYTES=0):
        construct(factory, seed=SEED, device=CPU)
    assert differences(kept[0], plain(linears)) == []


def test_values_that_differ_when_they_are_repeated_are_refused() -> None:
    """An operation whose randomness torch does not know of."""

    def factory() -> nn.Module:
        with mock.patch.object(construction, "_random_state", return_value=None):
            return linears()

    with mock.patch.multiple(construction, LEAST_BYTES=256, BUDGET_BYTES=0):
        model, made = construct(factory, seed=SEED, device=CPU)
    assert made is not None
    with pytest.raises(construction.ReplayError, match="give the module itself"):
        made.value_of(next(p for p in model.parameters() if p.is_meta))


def test_values_that_differ_within_the_constructor_make_it_run_whole() -> None:
    calls: list[int] = []

    def factory() -> nn.Module:
        calls.append(1)
        with mock.patch.object(construction, "_random_state", return_value=None):
            model = linears()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
            return model

    ours, freed = constructed(factory)
    assert (len(calls), freed) == (2, 0)
    assert differences(ours, plain(factory)) == []


# ---- architectures ---------------------------------------------------------------------------------------------------

A_FEW = ("llama", "mixtral", "mamba2", "whisper", "modernbert", "jamba", "lstm")


def check_architecture(name: str) -> None:
    build = functools.partial(architectures.build, name)
    ours, _ = constructed(build, least=4096, budget=64 << 10)
    assert differences(ours, plain(build)) == []


@pytest.mark.parametrize("name", A_FEW)
def test_architectures_are_initialised_as_by_themselves(name: str) -> None:
    check_architecture(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in architectures.NAMES if name not in A_FEW])
def test_all_architectures_are_initialised_as_by_themselves(name: str) -> None:
    library = name.partition("-")[0]
    if library in ("diffusers", "timm"):
        pytest.importorskip(library)
    check_architecture(name)


# ---- on ranks --------------------------------------------------------------------------------------------------------


def started(build: Callable[[], nn.Module], stage: int, tp: int = 1, pp: int = 1) -> tuple[dict[str, Tensor], Any]:
    """Masters and buffers of an engine whose model is given as a callable, before its first step."""
    config: dict[str, Any] = {
        "zero": {"stage": stage, "bucket_bytes": 1},
        "batch": {"micro_size": 2},
        "seed": SEED,
        "precision": "float32",
    }
    config["parallel"] = {"tp": tp, "pp": pp}
    with mock.patch.multiple(construction, LEAST_BYTES=256, BUDGET_BYTES=0):
        engine = speedlab.initialize(model=build, optimizer=sgd, config=config)[0]
    try:
        buffers = {name: b.clone() for module in engine.modules for name, b in module.named_buffers()}
        return engine.state_dict(), buffers
    finally:
        engine.destroy(keep_parameters=False)


ON_RANKS = [("whisper", {}), ("mamba2", {}), ("llama", {"tp": 2}), ("llama", {"pp": 2})]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("name", "layout"), ON_RANKS)
def test_engines_start_from_the_plain_construction(two: Pool, name: str, layout: dict[str, int], stage: int) -> None:
    build = functools.partial(architectures.build, name)
    theirs = plain(build)
    values = theirs.state_dict()
    for masters, buffers in two.run(started, build, stage if "pp" not in layout else min(stage, 1), **layout):
        assert [n for n, value in masters.items() if not torch.equal(value, values[n])] == []
        if not layout:
            assert set(masters) >= {n for n, _ in theirs.named_parameters()}
            assert [n for n, b in theirs.named_buffers() if not torch.equal(b, buffers[n])] == []


def saved(folder: str) -> nn.Module:
    """Loads weights, which transformers refuses to do under `torch.device("meta")`."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_callable_may_load_weights(two: Pool, tmp_path: Any, stage: int) -> None:
    theirs = architectures.seeded("llama")
    theirs.save_pretrained(tmp_path)
    for masters, _ in two.run(started, functools.partial(saved, str(tmp_path)), stage):
        assert [n for n, p in theirs.named_parameters() if not torch.equal(p, masters[n])] == []


def fails_on_one() -> nn.Module:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise KeyError("no such file")
    return linears()


def refusal(build: Callable[[], nn.Module]) -> tuple[str, str]:
    try:
        started(build, 0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_callable_that_fails_on_one_rank_fails_on_all(two: Pool) -> None:
    (kind, text), (own, _) = two.run(refusal, fails_on_one)
    assert (kind, own) == ("PeerLost", "KeyError")
    assert "failed on rank 1" in text
    assert "no such file" in text


# ---- blocks of several classes ---------------------------------------------------------------------------------------


def test_blocks_of_several_classes_are_units(two: Pool) -> None:
    """Jamba's list holds layers with attention and layers without."""
    jamba = functools.partial(architectures.seeded, "jamba")
    assert two.run(units_of, jamba)[0] == ["root", "model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("stage", [0, 3])
def test_models_of_several_classes_train_as_plain(two: Pool, stage: int) -> None:
    case = Case(stage=stage, build=functools.partial(architectures.seeded, "jamba"), loss=hugging_face_loss, steps=4)
    assert problems(two.run(train_engine, case), train_plain(case, 2), HF_FLOAT32) == []
