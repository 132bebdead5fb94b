"""Proof checks: dtypes of logits, loss and masters, and the fit of vocabulary and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from speedlab.telemetry.proof import Finding, Severity

KIND = "dtypes"
VOCABULARY = "vocabulary"
SECTION = "dtypes"
VOCABULARY_SECTION = "vocabulary"

_NARROW = ("bfloat16", "float16")
_MUCH_LARGER = 2.0
_PADDING = 1024
"""A vocabulary may be padded by this many tokens for kernels."""


def finding_of(
    *, compute: str, logits: str | None, loss: str | None, masters: Sequence[str], rounds_stochastically: bool
) -> Finding:
    """Return the finding about dtypes.

    Args:
        compute: The compute dtype.
        logits: Dtype of the logits; None if not seen.
        loss: Dtype of the loss; None if not seen.
        masters: Dtypes that the optimizer updates.
        rounds_stochastically: Whether updates are rounded stochastically.
    """
    parts = [f"compute {compute}", f"logits {logits or 'not seen'}", f"loss {loss or 'not seen'}"]
    text = ", ".join([*parts, f"masters {' and '.join(masters) or 'none'}"])
    if loss in _NARROW:
        reason = f"a loss in {loss} has about three digits; compute cross-entropy in float32 (logits.float())"
        return Finding(kind=KIND, severity=Severity.SUSPICIOUS, text=f"{text}: {reason}", section=SECTION)
    narrow = [master for master in masters if master in _NARROW]
    if narrow and not rounds_stochastically:
        reason = f"updates smaller than a rounding of {narrow[0]} are lost"
        return Finding(kind=KIND, severity=Severity.WRONG, text=f"{text}: {reason}", section=SECTION)
    if narrow:
        text += ", rounded stochastically"
    return Finding(kind=KIND, severity=Severity.OK, text=text, section=SECTION)


def vocabulary(*, model: int | None, tokenizer: int | None, largest: int | None) -> Finding:
    """Return the finding about the vocabulary.

    Args:
        model: Rows of the token embedding; None if not found.
        tokenizer: Number of the tokenizer's tokens; None without a tokenizer.
        largest: Largest token id in the batch.
    """

    def found(severity: Severity, text: str) -> Finding:
        return Finding(kind=VOCABULARY, severity=severity, text=text, section=VOCABULARY_SECTION)

    if model is None:
        return found(Severity.NOT_CHECKED, "no token embedding was found on rank 0")
    if largest is not None and largest >= model:
        return found(Severity.WRONG, f"the batch has token {largest:,}, and the model {model:,} tokens")
    if tokenizer is None:
        return found(Severity.NOT_CHECKED, f"the model has {model:,} tokens; no tokenizer was given to compare with")
    if tokenizer > model:
        return found(Severity.WRONG, f"the tokenizer has {tokenizer:,} tokens, and the model {model:,}")
    text = f"the model has {model:,} tokens, the tokenizer {tokenizer:,}"
    if model > _MUCH_LARGER * tokenizer and model > tokenizer + _PADDING:
        return found(
            Severity.SUSPICIOUS,
            f"{text}: rows that no text uses take memory and time, and such runs have shown spikes of the loss",
        )
    return found(Severity.OK, text)
