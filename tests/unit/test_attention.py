"""Attention as configuration: what each pattern sees, what is told of it, and what is refused."""

from __future__ import annotations

import pytest
import torch

from cuda_ops.block_sparse_attention import token_mask
from speedlab.config import AttentionConfig, ConfigError, ModelConfig, RunConfig, describe
from speedlab.config.attention import seen_blocks
from speedlab.models.gpt import layout_of

BLOCKS = {"kind": "block_sparse", "block": 16}


def attention(**fields) -> AttentionConfig:
    return AttentionConfig.model_validate({**BLOCKS, **fields})


def grid(config: AttentionConfig, length: int) -> list[str]:
    """Read off the layout that the kernel gets."""
    return ["".join("x" if seen else "." for seen in row) for row in layout_of(config, length).mask.tolist()]


GRIDS = {
    "sliding": ({"pattern": "sliding", "window": 17}, "x..... xx.... .xx... ..xx.. ...xx. ....xx"),
    "sliding, a token more": ({"pattern": "sliding", "window": 18}, "x..... xx.... xxx... .xxx.. ..xxx. ...xxx"),
    "sliding, itself": ({"pattern": "sliding", "window": 1}, "x..... .x.... ..x... ...x.. ....x. .....x"),
    "fixed": ({"pattern": "fixed", "window": 32}, "x..... xx.... .xx... .xxx.. .x.xx. .x.xxx"),
    "fixed, 2 of 3": (
        {"pattern": "fixed", "window": 48, "global_blocks": 2},
        "x..... xx.... xxx... .xxx.. .xxxx. .xxxxx",
    ),
    "longformer": ({"pattern": "longformer", "window": 32}, "x..... xx.... xxx... x.xx.. x..xx. x...xx"),
    "longformer, no global": (
        {"pattern": "longformer", "window": 32, "global_blocks": 0},
        "x..... xx.... .xx... ..xx.. ...xx. ....xx",
    ),
    "strided": ({"pattern": "strided", "window": 16, "stride": 32}, "x..... .x.... x.x... .x.x.. x.x.x. .x.x.x"),
    "custom": (
        {"pattern": "custom", "mask": ["xxxxxx", "xx....", "x.x...", "..xx..", "....x.", "x....x"]},
        "x..... xx.... x.x... ..xx.. ....x. x....x",
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_every_pattern_sees_what_its_definition_says(name) -> None:
    fields, expected = GRIDS[name]
    config = attention(**fields)
    assert grid(config, 96) == grid(config, 81) == expected.split()
    assert layout_of(config, 96) is layout_of(attention(**fields), 96)
    # A shorter sequence sees the beginning of the same.
    assert grid(config, 40) == [row[:3] for row in expected.split()[:3]]


BOTH_WAYS = {
    "fixed": ({"pattern": "fixed", "window": 32}, "xx.... xxxxxx .xxx.. .xxxxx .x.xxx .x.xxx"),
    "longformer": ({"pattern": "longformer", "window": 32}, "xxxxxx xxx... xxxx.. x.xxx. x..xxx x...xx"),
    "strided": ({"pattern": "strided", "window": 16, "stride": 32}, "x.x.x. .x.x.x x.x.x. .x.x.x x.x.x. .x.x.x"),
    "custom": (
        {"pattern": "custom", "mask": ["x....x", "xx....", "x.x...", "..xx..", "....x.", "x....x"]},
        "x....x xx.... x.x... ..xx.. ....x. x....x",
    ),
}


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_encoders_see_the_blocks_that_see_them(name) -> None:
    fields, expected = BOTH_WAYS[name]
    layout = layout_of(attention(**fields), 96, causal=False)
    assert ["".join("x" if seen else "." for seen in row) for row in layout.mask.tolist()] == expected.split()
    shorter = layout_of(attention(**fields), 40, causal=False)
    assert shorter.mask.equal(layout.mask[:3, :3])


def test_bigbird_and_dense_see_both_ways() -> None:
    config = attention(pattern="bigbird", window=32, random_blocks=2, seed=3)
    both = layout_of(config, 320, causal=False).mask
    assert both.equal(both.T)
    assert both.tril().equal(layout_of(config, 320).mask)
    assert seen_blocks(AttentionConfig(), 130, causal=False) == ((0, 1, 2),) * 3


def test_a_sliding_window_is_exact_to_the_token() -> None:
    seen = token_mask(layout_of(attention(window=18), 50), 50, 50)
    assert all(torch.equal(row.nonzero()[:, 0], torch.arange(max(0, t - 17), t + 1)) for t, row in enumerate(seen))


def test_bigbird_is_longformer_and_random_blocks() -> None:
    config = attention(pattern="bigbird", window=32, random_blocks=2, seed=3)
    base = layout_of(attention(pattern="longformer", window=32), 320).mask
    mask = layout_of(config, 320).mask
    assert bool((mask | base == mask).all())
    assert (mask & ~base).sum(1).tolist() == [min(2, max(0, row - 2)) for row in range(20)]
    assert seen_blocks(config, 320) == seen_blocks(attention(**config.model_dump()), 320)
    assert seen_blocks(config, 320) != seen_blocks(config.model_copy(update={"seed": 4}), 320)
    assert seen_blocks(config, 320)[:10] == seen_blocks(config, 160)


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_what_is_seen_is_told() -> None:
    view = describe(attention(pattern="fixed", window=32), 90)
    assert (view.density, view.last_sees, view.layers_to_first) == (15 / 21, 10 + 16 + 16 + 16, 2)
    assert str(view) == (
        "90 tokens in 6 blocks of 16: 71.4 % of dense causal attention's work, 1.4 times less\n"
        "a query sees 31 tokens on average (dense: 46); the last one sees 58: 16 to 31 and 48 to 89\n"
        "longest path between two tokens: 2 layers\n"
        "■\n■■\n·■■\n·■■■\n·■·■■\n·■·■■■"
    )
    long = str(describe(attention(pattern="longformer", window=32), 16 * 65)).splitlines()
    assert (len(long), long[3], long[-1]) == (3 + 17, "■", "░" + "·" * 14 + "░■")


def test_what_an_encoder_sees_is_told_both_ways() -> None:
    view = describe(attention(pattern="longformer", window=32), 90, causal=False)
    assert str(view) == (
        "90 tokens in 6 blocks of 16: 66.7 % of dense attention's work, 1.5 times less\n"
        "a query sees 62 tokens on average (dense: 90); the last one sees 42: 0 to 15 and 64 to 89\n"
        "longest path between two tokens: 2 layers\n"
        "■■■■■■\n■■■···\n■■■■··\n■·■■■·\n■··■■■\n■···■■"
    )
    assert "H176.00V29.33" in view.svg()  # All cells are dense attention's.
    config = RunConfig.model_validate(
        {"model": {"attention": {**BLOCKS, "pattern": "longformer", "window": 32, "both_ways": True}}}
    )
    assert config.attention_view(90).rows == view.rows


@pytest.mark.parametrize(
    "fields", [fields for fields, _ in GRIDS.values()] + [{"pattern": "bigbird", "window": 16, "random_blocks": 1}]
)
def test_layers_until_the_last_token_depends_on_the_first(fields) -> None:
    """By powers of the mask over tokens."""
    config = attention(**fields)
    length = 90
    step = token_mask(layout_of(config, length), length, length).float()
    reached, layers = step[-1], 1
    while not reached[0] and layers < length:
        reached, layers = ((reached @ step) + reached).bool().float(), layers + 1
    view = describe(config, length)
    assert view.layers_to_first == (layers if reached[0] else None)
    assert view.last_sees == int(step[-1].sum())


@pytest.mark.parametrize(
    "fields",
    [
        *(fields for fields, _ in GRIDS.values()),
        *({"window": window} for window in (1, 2, 16, 17, 90, 200)),
        {"pattern": "bigbird", "window": 16, "random_blocks": 1},
        {"pattern": "longformer", "window": 32},
        {"pattern": "strided", "window": 32, "stride": 48},
        {"pattern": "custom", "mask": ("x.....", ".x....", "..x...", "...x..", "....x.", "xxxxx.")},
        {"pattern": "custom", "mask": ("x.....", "xx....", ".xx...", ".xxx..", "...xx.", "xxxxxx")},
        {"pattern": "custom", "mask": ("x....x", "x.....", ".x.x..", "xxx...", "..xx..", "xxx.x.")},
    ],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("length", [81, 90, 96])
def test_what_is_seen_against_powers_of_the_mask_over_tokens(fields, length, causal) -> None:
    """A token depends on itself in each layer, by the residual stream. The last block has 1 token, a few, or all."""
    config = attention(**fields)
    if config.pattern == "sliding" and not causal:
        with pytest.raises(ValueError, match="'sliding' counts tokens before a query"):
            describe(config, length, causal=False)
        return
    step = token_mask(layout_of(config, length, causal=causal), length, length)
    view = describe(config, length, causal=causal)
    assert view.mean_sees == pytest.approx(int(step.sum()) / length, rel=1e-12)
    assert view.last_sees == int(step[-1].sum())
    blocks = -(-length // 16)
    assert view.density == sum(map(len, view.rows)) / (blocks * (blocks + 1) // 2 if causal else blocks**2)
    whole, itself = torch.ones(length, length).bool(), torch.eye(length).bool()
    whole = whole.tril() if causal else whole
    reached, layers = itself, 0
    while layers < length and not reached.equal(whole):
        reached, layers = ((reached.float() @ (step | itself).float()) > 0), layers + 1
        assert view.heard(layers) == int(reached[-1].sum())
    assert view.longest_path == (layers if reached.equal(whole) else None)


@pytest.mark.parametrize(("window", "path"), [(128, 517), (2, 65535), (65536, 1), (1, None)])
def test_the_longest_path_of_a_window_is_exact_to_the_token(window, path) -> None:
    view = describe(AttentionConfig(kind="block_sparse", window=window), 65536, layers=12)
    assert view.longest_path == path
    assert view.heard(12) == min(65536, 12 * (window - 1) + 1)
    if window == 128:
        assert "517 layers; after the model's 12 the last token depends on 1,525 of 65,536 tokens" in view.words[2]


def test_a_path_of_many_blocks_is_put_together_from_powers() -> None:
    """A chain of windows of two blocks, whose first all see: the last but one of the chain is the farthest."""
    view = describe(attention(pattern="longformer", window=32), 16 * 1000)
    assert view.longest_path == 998
    assert "enough" in describe(attention(pattern="longformer", window=32), 16 * 9, layers=7).words[2]
    assert "more" not in describe(attention(pattern="longformer", window=32), 16 * 9, layers=6).words[2]


def test_a_picture_has_few_nodes_and_says_what_queries_see() -> None:
    config = AttentionConfig(kind="block_sparse", pattern="longformer", window=1024)
    view = describe(config, 65536, layers=12)
    picture = view.svg()
    assert picture.count("<rect") == 64
    assert picture.count("<path") <= 10
    assert len(picture) < 25_000
    assert "queries 64,512 to 65,535: the last sees 1,088 tokens, 0 to 63 and 64,512 to 65,535" in picture
    assert view.grid.shares[63][62:] == ((15 * 16 // 2) / 256, 1.0)
    assert view.grid.shares[63][0] == 1 / 16
    assert "<script" not in view._repr_html_()
    assert view._repr_html_().count("<div") == len(view.words) + 3


def test_a_configuration_shows_what_its_model_sees() -> None:
    config = RunConfig(
        model={"layers": 3, "context": 256, "attention": {**BLOCKS, "window": 64}}, data={"sequence_length": 256}
    )
    assert config.attention_view() == describe(config.model.attention, 256, layers=3)
    assert config.attention_view(128).length == 128
    assert config.attention_view().words[2] == (
        "longest path between two tokens: 5 layers; after the model's 3 the last token depends on 190 of 256 tokens"
    )


def test_dense_attention_sees_all() -> None:
    view = describe(AttentionConfig(), 300)
    assert (view.density, view.last_sees, view.layers_to_first) == (1, 300, 1)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refusal(call) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": 40}, "block: 40 is no multiple of 16, in which the kernels work; 32 or 48 would work"),
        ({"block": 8}, "block: 8 is no multiple of 16, in which the kernels work; 16 would work"),
        (
            {"pattern": "bigbird", "window": 100},
            "window: 100 tokens are no whole blocks of 16, as pattern 'bigbird' needs; 96 or 112 would work",
        ),
        (
            {"pattern": "strided", "stride": 7},
            "stride: 7 tokens are no whole blocks of 16, as pattern 'strided' needs; 16 would work",
        ),
        (
            {"pattern": "fixed", "window": 32, "global_blocks": 3},
            "global_blocks: 3 of a run of 2 blocks (window 32 / block 16); at most 2 would work",
        ),
        (
            {"pattern": "custom"},
            "mask: pattern 'custom' needs it: a row for each block of queries, for instance ['x..', 'xx.', 'x.x']",
        ),
        (
            {"mask": ["x"]},
            "mask: is given, and pattern 'sliding' does not use it; set pattern to 'custom', or leave mask out",
        ),
        (
            {"pattern": "custom", "mask": ["x.", "x"]},
            "mask: row 1 is 'x'; expected 2 of 'x' and '.', as many as rows",
        ),
        (
            {"pattern": "custom", "mask": ["x.", "x1"]},
            "mask: row 1 is 'x1'; expected 2 of 'x' and '.', as many as rows",
        ),
        (
            {"pattern": "custom", "mask": ["x..", "..x", "x.x"]},
            "mask: row 1 is '..x', and sees nothing at or before itself (later blocks do not count); put 'x' at one of "
            "its places 0 to 1",
        ),
        ({"windw": 3}, "unknown key 'windw'; the nearest known key is 'window'"),
    ],
)
def test_a_pattern_that_is_none(fields, message) -> None:
    assert refusal(lambda: AttentionConfig(**{**BLOCKS, **fields})) == message


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"heads": 24},
            "kind: 'block_sparse' takes heads of a multiple of 8 elements from 16 to 256, and hidden 192 / heads 24 "
            "are 8; heads 6 or 8 or 12 would work",
        ),
        (
            {"hidden": 12, "heads": 2},
            "kind: 'block_sparse' takes heads of a multiple of 8 elements from 16 to 256, and hidden 12 / heads 2 are "
            "6; set hidden to a multiple of 16",
        ),
        (
            {"dropout": 0.1},
            "kind: 'block_sparse' drops no attention probabilities, and dropout is 0.1; set dropout to 0, or "
            "attention.kind to 'dense'",
        ),
        (
            {"attention": {"pattern": "custom", "mask": ["x.", "xx"]}},
            "mask: 2 rows are for 32 tokens in blocks of 16, and context is 256; give 16 rows, or set context to 32",
        ),
    ],
)
def test_a_model_that_a_pattern_does_not_fit(model, message) -> None:
    fields = {**model, "attention": {**BLOCKS, **model.get("attention", {})}}
    assert refusal(lambda: ModelConfig(**fields)) == f"attention.{message}"
    assert refusal(lambda: RunConfig(model=fields)) == f"model.attention.{message}"
    assert ModelConfig(**{**fields, "attention": {}}).attention.kind == "dense"


@pytest.mark.parametrize(
    ("name", "fields", "length", "most"),
    [("window", {}, 100, 100), ("stride", {"pattern": "strided", "window": 16}, 100, 96)],
)
def test_a_pattern_wider_than_a_sequence(name, fields, length, most) -> None:
    def run(tokens: int) -> RunConfig:
        own = {**BLOCKS, **fields, name: tokens}
        return RunConfig(model={"attention": own}, data={"sequence_length": length})

    assert refusal(lambda: run(128).layout(1)) == (
        f"model.attention.{name}: 128 tokens are more than data.sequence_length {length}, so that none is left out by "
        f"it; at most {most} would work, or model.attention.kind 'dense'"
    )
    assert run(most).layout(1).world_size == 1
    assert run(128).layout(1, built_in=False).world_size == 1


def test_a_sequence_longer_than_a_mask() -> None:
    config = attention(pattern="custom", mask=("x.", "xx"))
    with pytest.raises(ValueError, match=r"mask: 2 rows, expected 3 for 33 tokens in blocks of 16; cut the sequence"):
        layout_of(config, 33)


def test_it_is_kept_in_files(tmp_path) -> None:
    config = RunConfig(
        model={"context": 64, "attention": {**BLOCKS, "block": 32, "pattern": "custom", "mask": ["x.", "xx"]}},
        data={"sequence_length": 60},
    )
    for name in ("a.yaml", "a.json"):
        config.save(tmp_path / name)
        assert RunConfig.load(tmp_path / name) == config
    assert config.replace(model={"layers": 2}).model.attention == config.model.attention
