"""The announced models: their shapes give the announced parameters, and the built-in GPT's are counted exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from speedlab.config import MODEL_PRESETS, ConfigError, ModelConfig
from speedlab.planner.formulas import parameter_count
from speedlab.planner.layer_shapes import check_shape, shape_parameters
from speedlab.planner.presets import CLUSTERS, MODELS, cluster, model
from speedlab.planner.setup import ModelShape


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_announced_ones(name: str) -> None:
    preset = MODELS[name]
    check_shape(preset.shape)
    # Announcements round: 2.06 · 10¹² is "2 trillion", T5's 11.3 · 10⁹ "11 billion".
    assert shape_parameters(preset.shape) == pytest.approx(preset.announced, rel=0.035)


def test_published_counts_to_the_last_parameter() -> None:
    # GPT-2's, as every implementation prints them.
    printed = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    # As transformers counts them in the released configurations.
    printed |= {
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "mistral-7b": 7_241_732_096,
        "qwen2.5-7b": 7_615_616_512,
        "qwen2.5-72b": 72_706_203_648,
    }
    assert {name: shape_parameters(model(name)) for name in printed} == printed


def test_one_table_serves_configurations_and_plans() -> None:
    assert MODEL_PRESETS.keys() == {name for name, preset in MODELS.items() if preset.built_in}
    for name in MODEL_PRESETS:
        config = ModelConfig(preset=name)
        mine = replace(ModelShape.of_config(config, config.context), dropout=0.0, chunked_loss=False)
        assert mine == replace(model(name), dropout=0.0, context=config.context)
    with pytest.raises(
        ConfigError, match=r"llama-3-8b is a preset for plans .*; to train it give a module of your own"
    ):
        ModelConfig(preset="llama-3-8b")


def test_a_configuration_is_called_by_its_preset_as_long_as_it_is_one() -> None:
    def name(**changes) -> str:
        return ModelShape.of_config(ModelConfig(**changes), 128).name

    assert name(preset="gpt2", dropout=0.1) == "gpt2"
    assert name(layers=7) == "gpt-tiny with layers 7"
    assert name(layers=24, hidden=1024, heads=16, ffn_hidden=4096, vocab_size=50257) == (
        "24 layers of 1,024, 16 heads, feed-forward 4,096, vocabulary 50,257"
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_built_in_gpt_is_counted_alike(tied: bool, position: str, norm: str, bias: bool) -> None:
    config = ModelConfig.model_validate(
        {"preset": "gpt-tiny", "tied": tied, "position": position, "norm": norm, "bias": bias}
    )
    assert shape_parameters(ModelShape.of_config(config, config.context)) == parameter_count(config)


def test_clusters_have_the_announced_sizes() -> None:
    assert {name: cluster(name).world_size for name in CLUSTERS} == {
        "dgx-2": 16,
        "4-dgx-2": 64,
        "25-dgx-2": 400,
        "32-dgx-2": 512,
        "50-dgx-2": 800,
        "512-a100": 512,
        "1024-a100": 1024,
        "4000-a100": 4000,
    }


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"model 'gpt3' is not known; nearest: gpt3-175b\. Known"):
        model("gpt3")
    with pytest.raises(ValueError, match="do not say how many of what"):
        cluster("1024-a10")
    with pytest.raises(ValueError, match="nearest: dgx-2"):
        cluster("dgx2")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 7}, "hidden 768 does not divide by heads 7; use 6 heads"),
        ({"layers": 0}, "layers 0; it must be at least 1"),
        ({"kv_heads": 5}, "heads 12 do not divide by kv_heads 5"),
    ],
)
def test_impossible_shapes(change: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_shape(replace(model("gpt2"), **change))
