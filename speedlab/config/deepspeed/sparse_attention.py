"""Convert DeepSpeed's section `sparse_attention` to `model.attention`, and back.

Keys and defaults are those of DeepSpeed's runtime/config.py; their meaning is in its
ops/sparse_attention/sparsity_config.py.

- A DeepSpeed window reaches to both sides: with w blocks a causal query sees its own block and w // 2 before it.
- A bidirectional layout is for encoders here, whose blocks also see the later ones that see them. This is the same
  layout, except for runs ("fixed"), whose last blocks DeepSpeed shows to all.
"""

from __future__ import annotations

from typing import Any

from speedlab.config.attention import AttentionConfig
from speedlab.config.deepspeed.keys import RemainingKeys, whole, word, yes

SECTION = "sparse_attention"
FEATURE, HEADS = "sparse-attention", "head-layouts"
"""Names for `ignore`: read without the section; give all heads the layout of the first."""

_BLOCK = 16
_WINDOWS = {"fixed": ("num_local_blocks", 4), "bigbird": ("num_sliding_window_blocks", 3)}
_WINDOWS |= dict.fromkeys(("bslongformer", "local_sliding_window"), _WINDOWS["bigbird"])
"""Mode -> (the key of its window, its default in blocks)."""

_PATTERNS = {
    "fixed": "fixed",
    "bigbird": "bigbird",
    "bslongformer": "longformer",
    "local_sliding_window": "longformer",  # Without global blocks.
}
_MODES = ("dense", "variable", *_PATTERNS)
_ENCODERS = ("bigbird", "bslongformer", "local_sliding_window")
"""Modes with the same meaning in both directions."""

_EITHER_WAY = ("unidirectional", "bidirectional")
_INDICES, _ENDS = "global_block_indices", "global_block_end_indices"


def sparse_attention(keys: RemainingKeys) -> None:
    """Convert the section, key by key."""
    if keys.has(SECTION):
        if (on := keys.take(SECTION, yes)) is False:
            keys.agree(SECTION, "model.attention.kind 'dense'")
        elif on:
            keys.refuse(SECTION, "expected keys and values in { }, with a mode among them")
        return
    if not keys.under(SECTION):
        return
    mode = _default(keys, "mode", "fixed", _mode)
    if mode is None:
        return _leave_rest(keys, "the mode is none")
    if mode == "dense":
        keys.agree(f"{SECTION}.mode", "model.attention.kind 'dense'")
        return _leave_rest(keys, "attention is dense")
    first = _first_blocks(keys) if mode == "bslongformer" else 0
    if (lacking := _lacking(keys, mode, first)) is not None:
        path, reason = lacking
        keys.lack(path, FEATURE, reason)
        return _leave_rest(keys, f"see {path}")
    _pattern(keys, mode)
    if mode in ("fixed", "bigbird"):
        _count(keys, "num_global_blocks", "global_blocks")
    else:
        _honour(keys, _INDICES, "global_blocks", first)
    if mode == "bigbird":
        note = "drawn with model.attention.seed: others than DeepSpeed's"
        if keys.settings["model"]["attention"].get("both_ways"):
            note += ", and a block also sees the later ones that drew it"
        _count(keys, "num_random_blocks", "random_blocks", note)
    _heads(keys, mode)
    _leave_rest(keys, f"mode {mode!r} does not use it")
    return None


def _lacking(keys: RemainingKeys, mode: str, first: int | None) -> tuple[str, str] | None:
    """Return (path, reason) of a request that model.attention cannot express; None if there is none."""
    usual = "unidirectional" if mode == "local_sliding_window" else "bidirectional"
    path, said = f"{SECTION}.attention", keys.has(f"{SECTION}.attention")
    both = (keys.take(path, _direction) if said else usual) == "bidirectional"
    why = "" if said else ", which is DeepSpeed's default where the key is left out"
    if both and mode not in _ENCODERS:
        at = path if said else f"{SECTION}.mode" if keys.has_said(f"{SECTION}.mode") else SECTION
        return at, (
            f"attention is 'bidirectional'{why}, and runs of blocks see only earlier ones here; write attention "
            f"'unidirectional' for a causal model, or for an encoder one of the modes {', '.join(_ENCODERS)}"
        )
    if mode == "variable":
        reason = "runs of several lengths have no pattern here; model.attention.pattern 'custom' takes any mask"
        return f"{SECTION}.mode", reason
    if first is None:
        reason = "only the first blocks can be global here; model.attention.pattern 'custom' takes any mask"
        return f"{SECTION}.{_INDICES}", reason
    note = "for encoders; causal models are refused" if both else "attention is causal"
    if said:
        keys.honour(path, "model.attention.both_ways", both, note)
    elif both:
        keys.set("model.attention.both_ways", True)
        keys.assumed.append(f"{path}: bidirectional, {note}")
    return None


def _pattern(keys: RemainingKeys, mode: str) -> None:
    keys.set("model.attention.kind", "block_sparse")
    note = "of the built-in GPT; a model of your own attends as it does by itself"
    _honour(keys, "mode", "pattern", _PATTERNS[mode], note)
    block = _default(keys, "block", _BLOCK, whole) or _BLOCK
    _honour(keys, "block", "block", block)
    name, usual = _WINDOWS[mode]
    blocks = _default(keys, name, usual, whole) or usual
    seen = blocks if mode == "fixed" else blocks // 2 + 1
    note = f"{seen} blocks of {block}" + ("" if mode == "fixed" else ", a query's own and those before it")
    _honour(keys, name, "window", seen * block, note)
    horizontal = f"{SECTION}.horizontal_global_attention"
    if keys.settings["model"]["attention"].get("both_ways"):
        return  # This mode does not have the key.
    if (on := keys.take(horizontal, yes)) is True:
        keys.refuse(horizontal, "DeepSpeed takes it with attention 'bidirectional' only; set it to false")
    elif on is False:
        keys.agree(horizontal, "global blocks see no later ones")


def _count(keys: RemainingKeys, name: str, field: str, note: str = "") -> None:
    """Convert a number of blocks, 1 by default."""
    blocks = _default(keys, name, 1, whole)
    _honour(keys, name, field, 1 if blocks is None else blocks, note)


def _honour(keys: RemainingKeys, name: str, field: str, value: Any, note: str = "") -> None:
    """Set a field of model.attention from the key `name`, or from its default."""
    if keys.has_said(f"{SECTION}.{name}"):
        keys.honour(f"{SECTION}.{name}", f"model.attention.{field}", value, note)
    else:
        keys.set(f"model.attention.{field}", value)


def _heads(keys: RemainingKeys, mode: str) -> None:
    """Convert layouts by head: all heads have one layout here; DeepSpeed's differ if something in the mode does."""
    path, patterns = f"{SECTION}.different_layout_per_head", f"{SECTION}.num_different_global_patterns"
    different = keys.take(path, yes)
    count = keys.take(patterns, whole) if mode == "fixed" else None
    if count is not None:
        keys.agree(patterns, "the last blocks of each run are global, as in the first of these patterns")
    if different is None:
        return
    differ = (count or 1) > 1 or keys.settings["model"]["attention"].get("random_blocks", 0) > 0
    if different and differ:
        keys.lack(path, HEADS, "all heads of the GPT here see the same blocks")
    else:
        keys.agree(path, "all heads see the same blocks")


def _first_blocks(keys: RemainingKeys) -> int | None:
    """Return how many first blocks are global; None if other blocks are, too."""
    starts = _default(keys, _INDICES, [0], _places)
    starts = [0] if starts is None else starts
    ends = keys.take(f"{SECTION}.{_ENDS}", _places)
    if ends is not None:
        keys.agree(f"{SECTION}.{_ENDS}", f"with {_INDICES}")
    ends = [start + 1 for start in starts] if ends is None else ends
    blocks = {block for start, end in zip(starts, ends, strict=False) for block in range(start, end)}
    return len(blocks) if blocks == set(range(len(blocks))) and len(starts) == len(ends) else None


def _default(keys: RemainingKeys, name: str, usual: Any, kind: Any) -> Any:
    """Return the key's value, or DeepSpeed's default if it is missing; None if it is refused or "auto"."""
    path = f"{SECTION}.{name}"
    if keys.has(path):
        return keys.take(path, kind, "model.attention.kind")
    keys.assumed.append(f"{path}: {usual}")
    return usual


def _leave_rest(keys: RemainingKeys, reason: str) -> None:
    for path in keys.known_under(SECTION):
        keys.ignore(path, reason)


def _mode(value: Any) -> str:
    """dense, fixed, variable, bigbird, bslongformer or local_sliding_window"""
    name = {"local": "local_sliding_window"}.get(word(value), value)
    if name not in _MODES:
        raise ValueError(value)
    return name


def _direction(value: Any) -> str:
    """unidirectional or bidirectional"""
    if word(value) not in _EITHER_WAY:
        raise ValueError(value)
    return value


def _places(value: Any) -> list[int]:
    """whole numbers in [ ]"""
    if not isinstance(value, list | tuple):
        raise TypeError(value)
    return [whole(each) for each in value]


def section_of(attention: AttentionConfig) -> dict[str, Any]:
    """Return attention as DeepSpeed's section.

    Args:
        attention: the configuration.

    Returns:
        The section; empty if attention is dense, or has a pattern without such keys.
    """
    modes = {"fixed": "fixed", "longformer": "bslongformer", "bigbird": "bigbird"}
    runs_both_ways = attention.both_ways and attention.pattern == "fixed"
    if attention.kind == "dense" or attention.pattern not in modes or runs_both_ways:
        return {}
    mode, blocks = modes[attention.pattern], attention.window // attention.block
    written = {
        "mode": mode,
        "block": attention.block,
        "attention": "bidirectional" if attention.both_ways else "unidirectional",
        _WINDOWS[mode][0]: blocks if mode == "fixed" else 2 * blocks - 1,
    }
    if mode == "bslongformer":
        return {SECTION: {**written, _INDICES: list(range(attention.global_blocks))}}
    random = {"num_random_blocks": attention.random_blocks} if mode == "bigbird" else {}
    return {SECTION: {**written, "num_global_blocks": attention.global_blocks, **random}}
