"""What a model has besides plain parameters and buffers: extra states, quantised bases, complex buffers, averages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import speedlab
from ranks import models
from ranks.pool import Pool
from speedlab.engine.checkpoint import CheckpointError

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
WIDTH = models.WIDTH


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def engine_of(model: nn.Module, stage: int, **parallel: int) -> Any:
    config = {"zero": {"stage": stage, "bucket_bytes": 1}, "precision": "float32", "batch": {"micro_size": 6}}
    if parallel:
        config |= {"parallel": parallel}
    return speedlab.initialize(model=model, optimizer=sgd, config=config)[0]


def points(step: int) -> Tensor:
    return models.points(step, dist.get_rank())[0]


def train(engine: Any, step: int) -> None:
    engine.backward(engine(points(step)).square().mean())
    engine.step()


# ---- extra states ----------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Scales by a complex turn, and counts its calls in what is no buffer."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("turn", torch.polar(torch.ones(WIDTH), torch.linspace(0, 1, WIDTH)))
        self.register_buffer("passing", torch.ones(2, dtype=torch.complex64), persistent=False)
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64), requires_grad=False)
        self.calls, self.largest = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return torch.tanh(self.up(x)) * self.turn.real

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "seen": [self.largest, ("a", None, 1.5)], "turn": self.turn * 2}

    def set_extra_state(self, state: Any) -> None:
        assert state["seen"][1] == ("a", None, 1.5)
        assert state["turn"].is_complex()
        self.calls, self.largest = state["calls"], state["seen"][0].clone()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def saved_and_loaded(stage: int, folder: Path) -> dict[str, Any]:
    engine = engine_of(model := models.seeded(Counted), stage)
    for step in range(2):
        train(engine, step)
    with torch.no_grad():
        model.blocks[1].turn.mul_(1j)
    state = engine.state_dict()
    path = engine.save_checkpoint(folder, f"stage-{stage}")
    reported = {"keys": list(state), "own": [*map(_described, model.blocks)], "plain": list(Counted().state_dict())}
    reported["returned"] = state["blocks.2._extra_state"]["calls"]
    engine.destroy()
    other = engine_of(again := models.seeded(Counted, seed=8), (stage + 3) % 4)
    other.load_checkpoint(path)
    reported["loaded"] = [*map(_described, again.blocks)]
    loaded = other.state_dict()
    reported["same"] = all(loaded[n].equal(v) for n, v in state.items() if isinstance(v, Tensor))
    other.destroy()
    return reported


def _described(block: Any) -> tuple[int, float, complex]:
    return block.calls, float(block.largest), complex(block.turn[3])


@STAGES
def test_extra_states_and_complex_buffers_are_saved_and_returned(two: Pool, tmp_path: Path, stage: int) -> None:
    ours, theirs = two.run(saved_and_loaded, stage, tmp_path)
    for reported in (ours, theirs):
        assert reported["keys"] == reported["plain"]
        assert reported["returned"] == 2
        assert reported["loaded"] == reported["own"]
        assert reported["same"]
    assert ours["own"] != theirs["own"], "each rank has its own"


def one_file(stage: int, folder: Path) -> str:
    engine = engine_of(models.seeded(Counted), stage)
    train(engine, 0)
    engine.save_16bit_model(folder)
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    again = Counted()
    again.load_state_dict(state)
    assert [*map(_described, again.blocks)] == [*map(_described, engine.module.blocks)] or dist.get_rank()
    with pytest.raises(CheckpointError) as reported:
        engine.save_16bit_model(folder, "model.safetensors")
    engine.destroy()
    return str(reported.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_file_of_weights_has_extra_states(two: Pool, tmp_path: Path, stage: int) -> None:
    for reported in two.run(one_file, stage, tmp_path):
        assert "blocks.0._extra_state is a dict, and safetensors hold plain tensors" in reported


class Unsaved(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"inner": {1, 2}}

    def set_extra_state(self, state: Any) -> None: ...


def refused_state() -> str:
    with pytest.raises(speedlab.ConfigError) as reported:
        engine_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Unsaved(WIDTH, WIDTH)), 1)
    return str(reported.value)


def test_an_extra_state_that_would_have_to_be_pickled_is_refused(two: Pool) -> None:
    for reported in two.run(refused_state):
        assert reported.startswith("model: 1._extra_state/inner is a set")


# ---- quantised bases -------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A quantised layer with an adapter of its own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def torchao_base(seed: int) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(base := nn.Sequential(models.seeded(nn.Linear, 32, 32, seed=seed)), Int8WeightOnlyConfig())
    return base


def bitsandbytes_base(seed: int) -> nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    base = Linear8bitLt(32, 32, has_fp16_weights=False)
    base.load_state_dict(models.seeded(nn.Linear, 32, 32, seed=seed).state_dict())
    return base.to("cpu")


def nf4_base(seed: int) -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    base = Linear4bit(32, 32, quant_type="nf4", compute_dtype=torch.float32)
    base.load_state_dict(models.seeded(nn.Linear, 32, 32, seed=seed).state_dict())
    return base.to("cpu")


BASES = {"torchao": torchao_base, "8 bits": bitsandbytes_base, "4 bits": nf4_base}


def adapted(base: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed + 4)
        return nn.Sequential(*(Adapted(BASES[base](seed + layer)) for layer in range(3)))


def wide_points(step: int, rank: int) -> Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained_on_base(base: str, stage: int, folder: Path) -> dict[str, Any]:
    """The farthest parameter from a plain loop's, with evaluations between; what is returned, saved and loaded."""
    import warnings

    warnings.simplefilter("ignore")  # Of the packages, about kernels that are not there.
    plain, model = adapted(base), adapted(base)
    optimizer = sgd([p for p in plain.parameters() if p.requires_grad])
    engine = engine_of(model, stage)
    for step in range(3):
        torch.stack([loss_of(plain, wide_points(step, rank)) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(loss_of(engine, wide_points(step, dist.get_rank())))
        engine.step()
        with torch.no_grad():
            engine(wide_points(9, 0))
    expected, state = plain.state_dict(), engine.state_dict()
    reported: dict[str, Any] = {"keys": set(state) == set(expected)}
    reported["far"] = max(float((state[n] - v).abs().max()) for n, v in expected.items() if ".base" not in n)
    reported["base"] = all(str(state[n]) == str(v) for n, v in expected.items() if ".base" in n)
    made = engine(wide_points(7, 0)).detach()
    path = engine.save_checkpoint(folder, f"{base} {stage}")
    with pytest.raises(CheckpointError, match="is quantised or complex, and an export has plain weights"):
        speedlab.export_hf(engine, folder / f"export {base} {stage}")
    engine.reshape(zero=(stage + 1) % 4)
    engine.destroy()
    other = engine_of(adapted(base, seed=20), 3 - stage)
    other.load_checkpoint(path)
    reported["loaded"] = float((other(wide_points(7, 0)) - made).detach().abs().max())
    other.destroy()
    return reported


@pytest.mark.parametrize(
    ("base", "stage"),
    [
        ("torchao", 1),
        ("torchao", 3),
        ("8 bits", 3),
        ("4 bits", 3),
        *(pytest.param(base, stage, marks=pytest.mark.nightly) for base in BASES for stage in (0, 2)),
    ],
)
def test_adapters_on_a_quantised_base(two: Pool, tmp_path: Path, base: str, stage: int) -> None:
    for reported in two.run(trained_on_base, base, stage, tmp_path, timeout=60):
        assert reported["keys"]
        assert reported["base"]
        assert reported["far"] < 2e-5
        assert reported["loaded"] < 1e-6


def refused_bases() -> list[str]:
    said = []
    thawed: Any = adapted("torchao")
    thawed[0].base[0].weight.requires_grad_(True)
    cases: list[tuple[nn.Module, dict[str, int]]] = [(thawed, {}), (adapted("torchao"), {"tp": 2})]
    for model, parallel in cases:
        with pytest.raises(speedlab.ConfigError) as reported:
            engine_of(model, 1, **parallel)
        said.append(str(reported.value))
    return said


def test_what_a_quantised_base_cannot_be_is_refused(two: Pool) -> None:
    for trained, cut in two.run(refused_bases):
        assert trained.startswith("model: 0.base.0.weight is a Int8Tensor that requires a gradient")
        assert cut.startswith("model: 0.base.0.weight is a Int8Tensor, which stays whole on every rank")


# ---- reads of partitioned parameters ---------------------------------------------------------------------------------


def averaged(stage: int) -> dict[str, Any]:
    """Averages of weights between steps: torch's own, one by hand, and one of gathered values."""
    model: Any = models.seeded(Counted)
    before = AveragedModel(copy.deepcopy(model))
    engine = engine_of(model, stage)
    reported: dict[str, Any] = {}
    mean = {name: value.clone() for name, value in engine.state_dict().items() if isinstance(value, Tensor)}
    for step in range(2):
        train(engine, step)
        for name, value in engine.state_dict().items():
            if isinstance(value, Tensor):
                mean[name] = 0.5 * mean[name] + 0.5 * value
        for name, act in (("torch", lambda: before.update_parameters(model)), ("hand", lambda: by_hand(model))):
            try:
                reported[name] = act()
            except RuntimeError as error:
                reported[name] = str(error)
    reported["finite"] = all(
        bool(value.abs().isfinite().all()) for value in before.state_dict().values() if _is_float(value)
    )
    reported["mean"] = all(bool(value.abs().isfinite().all()) for value in mean.values())
    weight = model.blocks[0].up.weight
    reported["shape"] = (weight.shape, weight.data.numel(), weight.dtype, weight.device.type, weight.requires_grad)
    for what in (model.blocks[0].state_dict, lambda: copy.deepcopy(weight.data), weight.data.cpu):
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"blocks\.0\..*: .* needs its values"):
                what()
    reported["like"] = torch.zeros_like(weight).sum().item()
    engine.destroy()
    return reported


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def by_hand(model: Any) -> float:
    return sum(p.data.norm().item() for p in model.parameters())


@pytest.mark.parametrize("stage", [2, 3])
def test_averages_of_weights(two: Pool, stage: int) -> None:
    for reported in two.run(averaged, stage):
        assert reported["finite"]
        assert reported["mean"]
        assert reported["shape"] == ((WIDTH, WIDTH), WIDTH * WIDTH, torch.float32, "cpu", True)
        assert reported["like"] == 0.0
        if stage == 3:
            for name in ("torch", "hand"):
                assert "needs its values, and they are partitioned (ZeRO stage 3)" in reported[name]
                assert "speedlab.gather(parameter) and engine.state_dict()" in reported[name]
        else:
            assert reported["torch"] is None
            assert reported["hand"] > 0


# ---- another shape ---------------------------------------------------------------------------------------------------


def resized(stage: int) -> list[str]:
    """What is said of an embedding that is resized after `initialize`, as transformers does."""
    engine = engine_of(model := models.seeded(nn.Sequential, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), stage)
    said = []
    for read in (True, False):
        try:
            weight = model[0].weight
            if read:
                weight.data = torch.cat([weight.data, torch.zeros(1, WIDTH)])
            else:
                weight.data = torch.zeros(WIDTH + 1, WIDTH)
                model[0].bias.data = torch.zeros(WIDTH + 1)
                model[1].weight.data = torch.zeros(WIDTH, WIDTH + 1)
            train(engine, 0)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    engine.destroy(keep_parameters=False)
    return said


@STAGES
def test_another_shape_after_initialize(two: Pool, stage: int) -> None:
    for read, put in two.run(resized, stage):
        assert "before initialize" in put
        assert "shape (13, 12), and had (12, 12) at initialize" in put
        assert stage < 3 or "resize_token_embeddings" in read


# ---- adapters of parameters ------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """All experts in one parameter, (E, C, C), as transformers packs them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bc,ecd->bd", x, self.weights)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.experts(self.norm(x)))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def adapted_experts() -> nn.Module:
    """LoRA on `experts.weights` by PEFT's `target_parameters`, which parametrises it in each forward."""
    import warnings

    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, about a model without a configuration.
        torch.manual_seed(6)
        config = LoraConfig(r=2, target_modules=[], target_parameters=["experts.weights"], init_lora_weights=False)
        made: nn.Module = get_peft_model(Mixture(), config)  # type: ignore[arg-type]  # any module
        return made


def trained_experts(stage: int, checkpointing: str) -> float:
    plain, model = adapted_experts(), adapted_experts()
    optimizer = sgd([p for p in plain.parameters() if p.requires_grad])
    config = {"zero": {"stage": stage, "bucket_bytes": 1}, "precision": "float32", "batch": {"micro_size": 6}}
    config |= {"activation": {"checkpointing": checkpointing}}
    engine = speedlab.initialize(model=model, optimizer=sgd, config=config)[0]
    for step in range(4):
        torch.stack([plain(models.points(step, rank)[0]) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(points(step)))
        engine.step()
        with torch.no_grad():
            engine(points(9))
    state = engine.state_dict()
    engine.destroy()
    return max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(("stage", "checkpointing"), [(0, "none"), (2, "none"), (3, "none"), (3, "block")])
def test_adapters_of_expert_parameters(two: Pool, stage: int, checkpointing: str) -> None:
    assert max(two.run(trained_experts, stage, checkpointing, timeout=60)) < 2e-5
