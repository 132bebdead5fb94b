"""Models go out to and come in from transformers and DeepSpeed: judged by transformers' own logits, and by values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedlab
from ranks.conftest import PoolOf
from ranks.pool import Pool
from speedlab.config import ModelConfig
from speedlab.data import save_tokenizer
from speedlab.data.tokenizer import ByteTokenizer
from speedlab.models import GPT

pytest.importorskip("transformers")

TOKENS = torch.arange(24).view(2, 12) * 5 % 61


@dataclass(frozen=True)
class Small:
    """A small built-in GPT. Random biases and norms, so that none can be mistaken for another."""

    position: str = "rotary"
    norm: str = "rms"
    tied: bool = True
    bias: bool = False
    heads: int = 4

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            layers=2,
            hidden=32,
            ffn_hidden=48,
            vocab_size=61,
            context=16,
            **self.__dict__,  # type: ignore[arg-type]  # literals
        )

    def __call__(self) -> nn.Module:
        torch.manual_seed(7)
        model = GPT(self.config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model


GPT2 = Small(position="learned", norm="layer", bias=True)
EXACT = [
    GPT2,
    Small(position="learned", norm="layer", bias=True, tied=False),
    Small(),
    Small(tied=False, bias=True),
    Small(norm="layer", bias=True),
]


def settings(stage: int) -> dict[str, Any]:
    return {
        "zero": {"stage": stage, "bucket_bytes": 1},
        "precision": {"dtype": "float32"},
        "batch": {"micro_size": 1, "accumulation": 1},
    }


def with_engine(build: Callable[[], nn.Module], config: dict[str, Any], work: Callable[..., Any], *args: Any) -> Any:
    engine = speedlab.initialize(model=build(), config=config)[0]
    try:
        return work(engine, *args)
    finally:
        engine.destroy()


def failure_of(work: Callable[..., Any], *args: Any, **named: Any) -> str:
    try:
        work(*args, **named)
    except Exception as error:  # the test looks at its text
        return f"{type(error).__name__}: {error}"
    return "done"


# ---- out to transformers ---------------------------------------------------------------------------------------------


def export_gpt(small: Small, stage: int, folder: Path) -> None:
    from speedlab.engine.checkpoint import export_hf

    def work(engine: Any) -> None:
        path = engine.save_checkpoint(folder / "checkpoints", "here")
        export_hf(engine, str(folder / "of-engine"), shard_bytes=10_000)
        if engine.everyone.index == 0:
            save_tokenizer(ByteTokenizer(), folder / "tokenizer")  # As a run's folder has it.
            export_hf(str(folder), folder / "of-run")
            export_hf(path.parent, folder / "of-checkpoint", tag="here")
        for saved in (path, str(path), path.parent, str(folder)):  # What was returned, and whatever holds it.
            assert engine.load_checkpoint(saved) == (path, {})

    with_engine(small, settings(stage), work)


@pytest.mark.parametrize("small", EXACT, ids=str)
def test_transformers_loads_what_was_exported(two: Pool, tmp_path: Path, small: Small) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    two.run(export_gpt, small, 3, tmp_path)
    expected = small()(TOKENS).logits
    for folder in (tmp_path / "of-checkpoint", tmp_path / "of-engine", tmp_path / "of-run"):
        theirs, reported = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not reported["missing_keys"], reported
        assert not reported["unexpected_keys"], reported
        theirs.eval()
        torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    index = json.loads((tmp_path / "of-engine" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in (tmp_path / "of-engine").glob("*.safetensors")}
    assert AutoTokenizer.from_pretrained(tmp_path / "of-run")("hi")["input_ids"] == [104, 105]
    assert not (tmp_path / "of-engine" / "tokenizer.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "tokenizer") == [
        "checkpoints",
        "of-checkpoint",
        "of-engine",
        "of-run",
    ]


def export_refused(small: Small, folder: Path) -> list[str]:
    from speedlab.engine.checkpoint import export_hf

    return with_engine(small, settings(1), lambda engine: [failure_of(export_hf, engine, folder / "out")])


def test_what_transformers_does_not_compute_is_refused_by_field(two: Pool, tmp_path: Path) -> None:
    for small in (Small(position="learned"), Small(position="learned", norm="layer"), Small(norm="layer")):
        for (said,) in two.run(export_refused, small, tmp_path):
            assert said.startswith("CheckpointError")
            assert f"position '{small.position}' with norm '{small.norm}' and bias false" in said
    assert list(tmp_path.iterdir()) == []


# ---- in from transformers --------------------------------------------------------------------------------------------


def their_gpt2(folder: Path, **changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 48, "vocab_size": 61, "n_positions": 16, **changes}
    model = GPT2LMHeadModel(GPT2Config(**config)).eval()
    model.save_pretrained(folder)
    return model


def import_gpt(small: Small, stage: int, folder: Path) -> tuple[str, Tensor, int]:
    from speedlab.engine.checkpoint import import_hf

    def work(engine: Any) -> tuple[str, Tensor, int]:
        said = failure_of(import_hf, folder, engine)
        engine.eval()
        with torch.no_grad():
            logits = engine(TOKENS).logits.clone()
        return said, logits, len(engine.optimizer.state)

    return with_engine(small, settings(stage), work)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_folder_of_transformers_comes_in(two: Pool, tmp_path: Path, stage: int) -> None:
    expected = their_gpt2(tmp_path)(TOKENS).logits
    for said, logits, states in two.run(import_gpt, GPT2, stage, tmp_path):
        assert said == "done"
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert states == 0, "the optimizer begins again"


@pytest.mark.parametrize("small", EXACT, ids=str)
def test_what_went_out_comes_in_again(two: Pool, tmp_path: Path, small: Small) -> None:
    two.run(export_gpt, small, 2, tmp_path)
    expected = small()(TOKENS).logits
    for said, logits, _ in two.run(import_gpt, small, 1, tmp_path / "of-engine"):
        assert said == "done"
        assert logits.equal(expected) or (logits - expected).abs().max() < 1e-6


def test_names_without_the_model_around_them_are_found(two: Pool, tmp_path: Path) -> None:
    """As in the files of GPT-2 itself."""
    from safetensors.torch import load_file, save_file

    expected = their_gpt2(tmp_path)(TOKENS).logits
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): value for name, value in load_file(file).items()}, file)
    for said, logits, _ in two.run(import_gpt, GPT2, 1, tmp_path):
        assert said == "done"
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n_head": 8}, "n_head is 8 there and 4 here"),
        ({"activation_function": "relu"}, "activation_function is 'relu' there and 'gelu_new' here"),
        ({"vocab_size": 62}, "transformer.wte.weight has shape [62, 32] there"),
        ({"n_layer": 1}, "it has no tensor transformer.h.1."),
    ],
)
def test_another_model_is_refused_before_anything_changes(two: Pool, tmp_path: Path, changes, complaint: str) -> None:
    their_gpt2(tmp_path, **changes)
    expected = GPT2()(TOKENS).logits
    for said, logits, _ in two.run(import_gpt, GPT2, 2, tmp_path):
        assert said.startswith("CheckpointError")
        assert complaint in said
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_pickles_of_transformers_are_refused(two: Pool, tmp_path: Path) -> None:
    their_gpt2(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    for said, _, _ in two.run(import_gpt, GPT2, 0, tmp_path):
        assert "pytorch_model.bin: is a pickle" in said
        assert "convert" in said


def round_trip(small: Small, parallel: dict[str, int], stage: int, folder: Path) -> dict[str, Tensor]:
    """Out of one engine under a layout, and into another of other values under the same."""
    from speedlab.engine.checkpoint import export_hf, import_hf

    config = {**settings(stage), "parallel": parallel}
    with_engine(small, config, export_hf, folder / "out")

    def work(engine: Any) -> dict[str, Tensor]:
        import_hf(folder / "out", engine)
        return engine.state_dict()

    return with_engine(lambda: GPT(small.config), config, work)


def export_of_sparse_attention(folder: Path) -> str:
    from speedlab.engine.checkpoint import export_hf

    shape = {"layers": 1, "hidden": 32, "heads": 2, "ffn_hidden": 32, "vocab_size": 29, "context": 32}
    config = ModelConfig(**shape, attention={"kind": "block_sparse", "block": 16, "window": 16})
    return with_engine(lambda: GPT(config), settings(0), lambda engine: failure_of(export_hf, engine, folder))


def test_sparse_attention_is_nothing_that_transformers_has(two: Pool, tmp_path: Path) -> None:
    for said in two.run(export_of_sparse_attention, tmp_path / "out"):
        assert said.startswith("CheckpointError")
        assert "model.attention.kind is 'block_sparse', and no architecture of transformers attends to blocks" in said


@pytest.mark.parametrize("parallel", [{"tp": 4}, {"pp": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_folders_of_transformers_know_no_layout(pool_of: PoolOf, tmp_path: Path, parallel: dict[str, int]) -> None:
    from transformers import AutoModelForCausalLM

    for stage, small in ((1, GPT2), (3, Small(tied=False))):
        folder = tmp_path / str(stage)
        folder.mkdir()
        expected = small()
        for state in pool_of(4).run(round_trip, small, parallel, stage, folder):
            assert [n for n, p in expected.named_parameters() if not p.detach().equal(state[n])] == []
        theirs = AutoModelForCausalLM.from_pretrained(folder / "out").eval()
        torch.testing.assert_close(theirs(TOKENS).logits, expected(TOKENS).logits, rtol=1e-5, atol=1e-5)


# ---- a model of transformers under the engine ------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=61,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    )


def export_llama(folder: Path) -> None:
    from speedlab.engine.checkpoint import export_hf

    config = {"zero": {"stage": 3}, "precision": {"dtype": "bfloat16"}, "batch": {"micro_size": 1}}
    with_engine(llama, config, export_hf, folder / "out")


def import_llama(folder: Path) -> dict[str, Tensor]:
    from speedlab.engine.checkpoint import import_hf

    def build() -> nn.Module:
        model = llama()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model

    def work(engine: Any) -> dict[str, Tensor]:
        import_hf(folder, engine)
        return {name: value.clone() for name, value in engine.state_dict().items()}

    return with_engine(
        build, {"zero": {"stage": 2}, "precision": {"dtype": "float32"}, "batch": {"micro_size": 1}}, work
    )


def test_a_model_of_transformers_keeps_its_names(two: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    two.run(export_llama, tmp_path)
    theirs, reported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not reported["missing_keys"], reported
    assert not reported["unexpected_keys"], reported
    expected = llama()
    assert type(theirs) is type(expected)
    torch.testing.assert_close(theirs(TOKENS).logits, expected.eval()(TOKENS).logits, rtol=1e-5, atol=1e-5)
    for state in two.run(import_llama, tmp_path / "out"):
        assert [n for n, p in expected.named_parameters() if not p.detach().equal(state[n])] == []


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def universal(folder: Path, *, flat: bool, step: bool = True) -> dict[str, dict[str, Tensor]]:
    """A folder as DeepSpeed's converter writes it: of ZeRO-1 (tensors under "param"), or of ZeRO-3 (flat ones)."""
    torch.manual_seed(11)
    states: dict[str, dict[str, Tensor]] = {}
    for name, parameter in GPT2().named_parameters():
        place = folder / "global_step5_universal" / "zero" / name
        place.mkdir(parents=True)
        states[name] = {kind: torch.randn(parameter.shape).abs() for kind in ("fp32", "exp_avg", "exp_avg_sq")}
        for kind, tensor in states[name].items():
            torch.save(tensor.flatten() if flat else {"param": tensor, "cat_dim": 0}, place / f"{kind}.pt")
        if step:
            torch.save(torch.tensor(5.0), place / "step.pt")
    (folder / "latest_universal").write_text("global_step5_universal")
    return states


def import_universal(stage: int, folder: Path, named: dict[str, Any]) -> tuple[str, int, dict[str, Tensor], Any]:
    from speedlab.engine.checkpoint import import_deepspeed

    def work(engine: Any) -> tuple[str, int, dict[str, Tensor], Any]:
        said = failure_of(import_deepspeed, folder, engine, **named)
        masters = engine.state_dict()
        engine.reshape(zero=0)
        optimizer = engine.partitioned_optimizer
        moments = {
            slot.name: {
                kind: state[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()
                for kind, state in optimizer.states_of(flat).items()
            }
            for flat in engine.flats
            for slot in flat.slots
        }
        steps = {float(state["step"]) for state in engine.optimizer.state.values()}
        return said, engine.global_step, masters, (moments, steps)

    return with_engine(GPT2, settings(stage), work)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_a_universal_checkpoint_comes_in_on_trust(two: Pool, tmp_path: Path, flat: bool, stage: int) -> None:
    states = universal(tmp_path, flat=flat, step=not flat)
    named = {"trust_pickle": True, "step": 5 if flat else None}
    for said, step, masters, (moments, steps) in two.run(import_universal, stage, tmp_path, named):
        assert said == "done"
        assert (step, steps) == (5, {5.0})
        for name, expected in states.items():
            assert masters[name].equal(expected["fp32"]), name
            assert moments[name]["exp_avg"].equal(expected["exp_avg"]), name
            assert moments[name]["exp_avg_sq"].equal(expected["exp_avg_sq"]), name


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def test_a_universal_checkpoint_is_refused_without_trust_and_when_it_is_wrong(two: Pool, tmp_path: Path) -> None:
    universal(tmp_path, flat=False, step=False)
    tag = tmp_path / "global_step5_universal"
    trusted = {"trust_pickle": True}
    cases: list[tuple[dict[str, Any], Callable[[], object], str]] = [
        ({}, lambda: None, "say trust_pickle=True"),
        (trusted, lambda: None, "give step="),
        (trusted, lambda: torch.save({"param": torch.zeros(3)}, tag / "zero/norm.bias/fp32.pt"), "norm.bias/fp32.pt"),
        (trusted, lambda: torch.save({"param": Harmful()}, tag / "zero/norm.bias/fp32.pt"), "more than tensors"),
        (trusted, lambda: (tag / "zero/norm.bias/fp32.pt").write_bytes(b"cut"), "norm.bias/fp32.pt"),
        (trusted, (tag / "zero/norm.bias/fp32.pt").unlink, "is missing"),
    ]
    for named, spoil, complaint in cases:
        spoil()
        for said, step, masters, _ in two.run(import_universal, 2, tmp_path, named):
            assert said.startswith("CheckpointError")
            assert complaint in said
            assert step == 0
            assert all(masters[name].equal(p) for name, p in GPT2().named_parameters()), "nothing has changed"
