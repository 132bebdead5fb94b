"""What a configuration accepts, what it refuses and with which words, and that text takes nothing from it."""

from __future__ import annotations

import inspect
import json
import pickle
import pydoc
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speedlab.config import (
    MODEL_PRESETS,
    BatchConfig,
    ConfigError,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
    ZeroConfig,
    annotated_yaml,
)
from speedlab.config.validation import offload_problems


def refusal(**data) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**data)
    return str(caught.value)


# Unknown keys


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"zeor": 1}, "unknown key 'zeor'; the nearest known key is 'zero'"),
        ({"stage": 3}, "unknown key 'stage'; the nearest known key is 'zero.stage'"),
        ({"zero": {"stge": 1}}, "zero: unknown key 'stge'; the nearest known key is 'stage'"),
        (
            {"vocab_size": 9},
            "unknown key 'vocab_size'; the nearest known keys are 'model.vocab_size', 'data.vocab_size'",
        ),
        ({"micro_sise": 9}, "unknown key 'micro_sise'; the nearest known key is 'batch.micro_size'"),
        ({"train_batch_size": 8}, "unknown key 'train_batch_size'; the nearest known key is 'batch.global_size'"),
        (
            {"optimizer": {"learning_rate": 1.0}},
            "optimizer: unknown key 'learning_rate'; the nearest known key is 'lr'",
        ),
        ({"self": 1}, "unknown key 'self'; the nearest known key is 'seed'"),
        ({"data": {3: 4}}, "data: unknown key '3'; known keys: source, sequence_length, "),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_known_name(data, message) -> None:
    assert refusal(**data).startswith(message)


def test_every_unknown_key_is_named() -> None:
    assert refusal(zeor=1, stepz=2).splitlines() == [
        "unknown key 'zeor'; the nearest known key is 'zero'",
        "unknown key 'stepz'; the nearest known key is 'steps'",
    ]


def test_every_problem_is_told_beside_unknown_keys_in_the_parts_too() -> None:
    assert refusal(
        zero=9, stepz=3, compile=1, seed=True, optimizer={"lr": -1, "epz": 0}, model={"preset": "gpt3", "layerz": 2}
    ).splitlines() == [
        "unknown key 'stepz'; the nearest known key is 'steps'",
        "seed is true, but it is not a yes-or-no field",
        "model: unknown key 'layerz'; the nearest known key is 'layers'",
        "model.preset: unknown model preset 'gpt3'; nearest: 'gpt2'; known: gpt-tiny, gpt-mini, gpt2, gpt2-medium, "
        "gpt2-large, gpt2-xl",
        "zero.stage: Input should be 0, 1, 2 or 3 (got 9)",
        "optimizer: unknown key 'epz'; the nearest known key is 'eps'",
        "optimizer.lr: Input should be greater than 0 (got -1)",
    ]
    assert refusal(data={"sequence_length": 512, "vocab_size": 5000}, offload={"parameters": "host"}).splitlines() == [
        "data.sequence_length 512 is longer than model.context 256; shorten the sequence or raise the context",
        "data.vocab_size 5000 is larger than model.vocab_size 4096; lower the first or raise the second",
        *offload_problems(OffloadConfig(parameters="host"), stage=2, checkpointing="none"),
    ]


@pytest.mark.parametrize(
    ("data", "example"),
    [
        ({"offload": "disk"}, 'offload={"optimizer": "disk"}'),
        ({"offload": "gpu"}, 'offload={"optimizer": "none"}'),
        ({"activation": "block"}, 'activation={"checkpointing": "block"}'),
        ({"schedule": "linear"}, 'schedule={"kind": "linear"}'),
        ({"parallel": 2}, 'parallel={"dp": 2}'),
        ({"checkpoint": 50}, 'checkpoint={"every_steps": 50}'),
        ({"eval": None}, 'eval={"every_steps": 50}'),
        ({"telemetry": "x"}, 'telemetry={"stream_hz": 10.0}'),
        ({"zero": "3"}, 'zero={"stage": 2}'),
        ({"batch": 2.5}, 'batch={"global_size": 1}'),
        ({"batch": None}, 'batch={"global_size": 1}'),
    ],
)
def test_a_part_that_is_no_dict_is_refused_with_one_that_works(data, example) -> None:
    (field, value) = next(iter(data.items()))
    assert refusal(**data) == f"{field} is {value!r}, but it has fields of its own; give them, for instance {example}"
    part = json.loads(example.partition("=")[2])
    assert RunConfig(**{field: part})


@pytest.mark.parametrize("part", [RunConfig, *filter(None, map(RunConfig.part_of, RunConfig.model_fields))])
def test_help_of_a_part_tells_its_fields(part) -> None:
    shown = "".join(pydoc.plain(pydoc.render_doc(part)).replace("|", "").split())
    for name, field in part.model_fields.items():
        assert "".join(f"{name}: {field.description}".split()) in shown
        if (inner := part.part_of(name)) is not None:
            assert f";{inner.__name__}({','.join(inner.model_fields)})" in shown
    assert "".join((inspect.getdoc(part) or "").partition("Attributes:")[0].split()) in shown


@pytest.mark.parametrize("field", [f for f in RunConfig.model_fields if RunConfig.part_of(f)])
def test_each_part_knows_its_own_keys_only(field) -> None:
    assert refusal(**{field: {"no-such-key": 1}}).startswith(f"{field}: unknown key 'no-such-key'; ")


# Values


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"zero": 7}, "zero.stage: Input should be 0, 1, 2 or 3 (got 7)"),
        ({"zero": True}, "zero: stage is true, but it is not a yes-or-no field"),
        ({"parallel": {"tp": True}}, "parallel: tp is true, but it is not a yes-or-no field"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1 (got 0)"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: Input should be a finite number (got inf)"),
        ({"clip_norm": float("nan")}, "clip_norm: Input should be a finite number (got nan)"),
        ({"optimizer": {"betas": (0.9, 1.0)}}, "optimizer.betas: Input should be less than 1 (got 1.0)"),
        ({"model": "gpt3"}, "model.preset: unknown model preset 'gpt3'; nearest: 'gpt2'; known: gpt-tiny, "),
        ({"model": {"preset": ["gpt2"]}}, "model.preset: unknown model preset ['gpt2']; "),
        # What is predicted of a model looks at each layer, and at each block of a sparse context.
        ({"model": {"layers": 2**53}}, f"model.layers: Input should be less than or equal to 10000 (got {2**53})"),
        ({"model": {"hidden": 2**40}}, f"model.hidden: Input should be less than or equal to 1048576 (got {2**40})"),
        (
            {"model": {"context": 2**40, "attention": {"kind": "block_sparse"}}},
            "model.attention.block: context 1099511627776 in blocks of 64 are 17,179,869,184 blocks; at most 262,144 "
            "are looked through: set context to at most 16777216, or take larger blocks",
        ),
        ({"model": {"heads": 5}}, "model: hidden 192 does not divide by heads 5; heads 4 would work"),
        (
            {"model": {"hidden": 9, "heads": 3}},
            "model: rotary positions need an even head size, and hidden 9 is odd; make it even",
        ),
        (
            {"model": {"hidden": 12, "heads": 4}},
            "model: rotary positions need an even head size; hidden 12 / heads 4 is odd; heads 3 would work",
        ),
        (
            {"data": {"sequence_length": 512}},
            "data.sequence_length 512 is longer than model.context 256; shorten the sequence or raise the context",
        ),
        (
            {"data": {"vocab_size": 5000}},
            "data.vocab_size 5000 is larger than model.vocab_size 4096; lower the first or raise the second",
        ),
        ({"data": ()}, "data.source: no source is named; give 'stdlib', or the paths of files or folders"),
        ({"data": ["a", ""]}, "data.source: no source is named; "),
    ],
)
def test_what_cannot_run_is_refused_with_rule_and_values(data, message) -> None:
    assert refusal(**data).startswith(message)


def test_each_fault_has_its_line() -> None:
    assert refusal(steps=0, optimizer={"lr": -1, "eps": 0}, model={"heads": 5}).splitlines() == [
        "steps: Input should be greater than or equal to 1 (got 0)",
        "model: hidden 192 does not divide by heads 5; heads 4 would work",
        "optimizer.lr: Input should be greater than 0 (got -1)",
        "optimizer.eps: Input should be greater than 0 (got 0)",
    ]


def test_a_part_by_itself_is_refused_in_the_same_words_and_the_error_survives_pickling() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key 'stge'; the nearest known key is 'stage'$") as caught:
        ZeroConfig(stge=1)  # pyright: ignore[reportCallIssue]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", ["quickstart", "a", "Größe-1.2_b", "3", "x" * 100])
def test_run_names(name) -> None:
    assert RunConfig(name=name).name == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-option", "a/b", "a\\b", "a b", "a\n", "x\0", "x" * 101, "é" * 51]
)
def test_names_that_are_no_folder_are_refused(name) -> None:
    assert "cannot name a folder" in refusal(name=name)


# Short forms, presets, replace


def test_short_forms_are_their_field() -> None:
    short = RunConfig(model="gpt2", data="stdlib", zero=3, precision="bfloat16", optimizer="sgd", batch=64)
    long = RunConfig(
        model={"preset": "gpt2"},
        data={"source": "stdlib"},
        zero={"stage": 3},
        precision={"dtype": "bfloat16"},
        optimizer={"name": "sgd"},
        batch={"global_size": 64},
    )
    assert short == long
    assert (short.model.hidden, short.zero.stage, short.batch.global_size) == (768, 3, 64)
    assert RunConfig(data=["a.py", "b"]).data.source == ("a.py", "b")


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_a_preset_gives_its_fields_and_any_may_be_changed(preset) -> None:
    plain = ModelConfig(preset=preset)
    for field, value in MODEL_PRESETS[preset].items():
        assert getattr(plain, field) == value
    changed = ModelConfig(preset=preset, layers=1)
    assert (changed.layers, changed.hidden) == (1, plain.hidden)
    assert (plain.changes(), changed.changes()) == ({}, {"layers": 1})


def test_replace_changes_only_what_is_named() -> None:
    base = RunConfig(optimizer={"lr": 0.5}, zero={"bucket_bytes": 77}, batch={"micro_size": 3})
    assert base.replace(zero=3).zero == ZeroConfig(stage=3, bucket_bytes=77)
    assert base.replace(optimizer="sgd").optimizer == OptimizerConfig(name="sgd", lr=0.5)
    assert base.replace(optimizer={"eps": 1.0}).optimizer == OptimizerConfig(lr=0.5, eps=1.0)
    assert base.replace(zero=ZeroConfig(stage=1)).zero == ZeroConfig(stage=1)
    assert base.replace(batch=64).batch == BatchConfig(global_size=64, micro_size=3)
    assert base.replace(steps=9, name="n") == RunConfig(**{**base.model_dump(), "steps": 9, "name": "n"})
    assert base.replace() == base


def test_replacing_the_preset_takes_all_its_fields() -> None:
    base = RunConfig(model={"layers": 2})
    assert base.replace(model="gpt2").model == ModelConfig(preset="gpt2")
    assert base.replace(model={"preset": "gpt2", "layers": 3}).model == ModelConfig(preset="gpt2", layers=3)
    assert base.replace(model={"dropout": 0.1}).model == ModelConfig(layers=2, dropout=0.1)


def test_replace_refuses_like_the_constructor_and_leaves_the_old_one() -> None:
    base = RunConfig()
    with pytest.raises(ConfigError, match="unknown key 'zeor'; the nearest known key is 'zero'"):
        base.replace(zeor=1)
    with pytest.raises(ConfigError, match=r"zero.stage: Input should be 0, 1, 2 or 3 \(got 9\)"):
        base.replace(zero=9)
    assert base == RunConfig()


def test_a_configuration_does_not_change() -> None:
    config = RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert config.steps == 200


def test_every_field_has_a_description() -> None:
    def missing(part) -> list[str]:
        found = []
        for name, field in part.model_fields.items():
            found += missing(part.part_of(name)) if part.part_of(name) else []
            found += [] if field.description else [f"{part.__name__}.{name}"]
        return found

    assert missing(RunConfig) == []


# The batch equation

sizes = st.integers(1, 64)


@given(sizes, sizes, sizes)
def test_any_two_sizes_give_the_third(micro: int, accumulation: int, dp: int) -> None:
    total = micro * accumulation * dp
    for given_sizes in (
        {"micro_size": micro, "accumulation": accumulation},
        {"global_size": total, "micro_size": micro},
        {"global_size": total, "accumulation": accumulation},
        {"global_size": total, "micro_size": micro, "accumulation": accumulation},
    ):
        batch = BatchConfig(**given_sizes).resolve(dp)
        assert (batch.global_size, batch.micro_size, batch.accumulation, batch.dp) == (total, micro, accumulation, dp)


@given(st.integers(1, 4096), st.none() | sizes, st.none() | sizes, sizes)
def test_the_equation_holds_or_its_refusal_says_what_would(
    total: int, micro: int | None, accumulation: int | None, dp: int
) -> None:
    config = BatchConfig(global_size=total, micro_size=micro, accumulation=accumulation)
    step = (micro or 1) * (accumulation or 1) * dp
    if total % step or (micro and accumulation and total != step):
        with pytest.raises(ConfigError) as caught:
            config.resolve(dp)
        if micro and accumulation:
            assert f"the right side is {step}; leave one of them out" in str(caught.value)
        else:
            near = int(str(caught.value).split("a global batch of ")[1].split()[0])
            assert near == max(
                step, min((total // step * step, -(-total // step) * step), key=lambda n: abs(n - total))
            )
            assert BatchConfig(global_size=near, micro_size=micro, accumulation=accumulation).resolve(dp)
    else:
        batch = config.resolve(dp)
        assert batch.global_size == total == batch.micro_size * batch.accumulation * batch.dp
        assert batch.micro_size == (micro or batch.micro_size)
        assert batch.accumulation == (accumulation or batch.accumulation)


def test_the_equation_is_printed_whole() -> None:
    assert str(BatchConfig(micro_size=8, accumulation=2).resolve(4)) == (
        "global batch 64 = micro-batch 8 × accumulation 2 × dp 4"
    )
    assert str(BatchConfig().resolve(2)) == "global batch 16 = micro-batch 8 × accumulation 1 × dp 2"
    with pytest.raises(ConfigError) as caught:
        BatchConfig(global_size=10, micro_size=3).resolve(2)
    assert str(caught.value) == (
        "batch: the equation global 10 = micro 3 × accumulation ? × dp 2 has no whole solution; "
        "a global batch of 12 would work, it must be a multiple of 6"
    )


# Text

configs = st.builds(
    RunConfig,
    name=st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    steps=st.integers(1, 10**9),
    seed=st.integers(0, 2**63 - 1),
    clip_norm=st.none() | st.floats(1e-30, 1e30),
    zero=st.builds(ZeroConfig, stage=st.sampled_from([0, 1, 2, 3]), bucket_bytes=st.integers(1, 2**40)),
    model=st.builds(
        ModelConfig, preset=st.sampled_from(list(MODEL_PRESETS)), layers=st.integers(1, 99), tied=st.booleans()
    ),
    optimizer=st.builds(OptimizerConfig, lr=st.floats(1e-300, 1e300), betas=st.tuples(*[st.floats(0, 0.999)] * 2)),
    data=st.text("äab c:#'\"\\{}[]-?!&*|>%@`\n\t", min_size=1).map(lambda source: {"source": source})
    | st.lists(st.sampled_from(["a", "yes", "1e3", "null", "~"]), min_size=1).map(lambda source: {"source": source}),
)


@settings(max_examples=40, phases=[Phase.explicit, Phase.generate])  # PyYAML is slow, and shrinking calls it often.
@given(configs)
def test_nothing_is_lost_in_json_and_yaml(tmp_path_factory, config: RunConfig) -> None:
    folder = tmp_path_factory.mktemp("configs")
    for name in ("config.json", "config.yaml", "config.yml"):
        config.save(folder / name)
        assert RunConfig.load(folder / name) == config
    (folder / "annotated.yaml").write_text(annotated_yaml(config), encoding="utf-8")
    assert RunConfig.load(folder / "annotated.yaml") == config
    assert RunConfig(**config.model_dump()) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_in_annotated_yaml_the_preset_can_be_changed(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(annotated_yaml(RunConfig(model={"layers": 3})).replace('"gpt-tiny"', '"gpt2"'))
    assert RunConfig.load(path).model == ModelConfig(preset="gpt2", layers=3)


def test_annotated_yaml_describes_every_field() -> None:
    text = annotated_yaml(RunConfig())
    for part in (RunConfig, ZeroConfig, ModelConfig):
        for name, field in part.model_fields.items():
            assert f"{name}:" in text
            if part.part_of(name) is None:
                assert f"# {field.description}" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"steps": 3,}', "not valid JSON at line 1, column "),
        ("a.conf", b"steps: 3", "expecting value; a YAML file ends in .yaml or .yml"),
        ("a.yaml", b"zero: [1", "not valid YAML: "),
        ("a.yaml", b"", "holds nothing; expected keys and values, as `speedlab config` prints them"),
        ("a.yaml", b"- 1\n- 2\n", "holds a list; expected keys and values"),
        ("a.json", b"\xff\xfe\x00", "is not text: byte 0 is not UTF-8; expected JSON or YAML"),
        ("a.yaml", b"zero: {stge: 1}", "zero: unknown key 'stge'; the nearest known key is 'stage'"),
        ("a.yaml", b"!!python/object/apply:os.system ['true']", "not valid YAML: could not determine a constructor"),
    ],
)
def test_files_that_hold_no_configuration_are_refused_by_name(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert message.lower() in str(caught.value).lower()


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"missing.yaml: cannot be read: No such file or directory$"):
        RunConfig.load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        RunConfig.load(tmp_path)


def test_yaml_numbers_without_a_point_are_numbers(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("optimizer: {lr: 3e-4}\n")
    assert RunConfig.load(tmp_path / "a.yaml").optimizer.lr == 3e-4


def test_the_home_folder_is_expanded(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunConfig(folder="~/runs").folder == tmp_path / "runs"
    assert RunConfig().folder == Path("runs")


def test_an_update_in_backward_is_refused_before_anything_starts() -> None:
    config = RunConfig(optimizer={"in_backward": True}, batch={"accumulation": 2, "micro_size": 1}, precision="float16")
    with pytest.raises(ConfigError) as reported:
        config.layout(2)
    assert [
        line.split(":")[0].removeprefix("optimizer.in_backward cannot be with ")
        for line in str(reported.value).splitlines()
    ] == [
        "clip_norm 1.0",
        "batch.accumulation 2",
        "parallel.dp 2",
        "precision.dtype float16",
    ]
    good = RunConfig(optimizer={"in_backward": True}, clip_norm=None)
    assert good.layout(1).dp == 1


def test_masters_are_left_out_in_bfloat16_only() -> None:
    with pytest.raises(ConfigError) as reported:
        RunConfig(precision={"dtype": "float32", "masters": "none"})
    assert "precision.masters 'none' needs precision.dtype bfloat16" in str(reported.value)
    assert RunConfig(precision={"masters": "none"}).precision.dtype == "auto"


def test_inputs_are_partitioned_where_blocks_are_computed_again() -> None:
    assert RunConfig(activation={"checkpointing": "selective", "partition_inputs": True}).activation.partition_inputs
    with pytest.raises(ConfigError, match=r"partition_inputs true needs activation\.checkpointing .* set .* 'block'"):
        RunConfig(activation={"partition_inputs": True})


def test_selective_recomputation_chooses_alone_what_is_kept() -> None:
    selective = {"checkpointing": "selective"}
    assert RunConfig(activation=selective).activation.checkpointing == "selective"
    with pytest.raises(ConfigError, match=r"compile true with activation.checkpointing 'selective'.* set .* 'block'"):
        RunConfig(activation=selective, compile=True)
    with pytest.raises(ConfigError, match=r"offload.activations 'host' needs activation\.checkpointing 'block', and"):
        RunConfig(activation=selective, offload={"activations": "host"})
