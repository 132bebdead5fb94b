"""Count FLOPs of a training step in the four published conventions. No torch.

A multiplication and an addition are two operations. For a GPT with a feed-forward layer of 4 hidden, l layers, hidden
size h, sequences of s and a vocabulary of V, the FLOPs of a step for one token are

- model: 72 l h² (1 + s / 6h + V / 12lh) (arXiv:2205.05198, PaLM's MFU): what the model needs.
- hardware: 96 l h² (1 + s / 6h + V / 16lh) (arXiv:2104.04473): with recomputed blocks; without recomputation equal to
  model.
- parameters: 8 N with, 6 N without recomputation: no attention, embeddings counted.
- attention: 6 N + 12 l h s: embeddings counted.

The code counts matrices, so that it covers other shapes, too. No convention halves attention for a causal mask. Sparse
attention counts with its share of the scores.
"""

from __future__ import annotations

from typing import Literal, get_args

from speedlab.planner.layer_shapes import block_weights, cross_attention, head_size, shape_parameters
from speedlab.planner.setup import Checkpointing, ModelShape

Convention = Literal["model", "hardware", "parameters", "attention"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)


def token_flops(
    shape: ModelShape, convention: Convention, checkpointing: Checkpointing = "none", *, attention_share: float = 1.0
) -> float:
    """Return the FLOPs of a step (forward and backward) for one token.

    Args:
        shape: the model.
        convention: which operations count.
        checkpointing: what backward recomputes.
        attention_share: computed share of the scores (1 for dense attention).

    Raises:
        ValueError: the convention is unknown.
    """
    again = checkpointing == "block"
    inner = shape.heads * head_size(shape)
    depth = shape.layers + 2 * shape.decoder_layers  # A decoder's layer attends twice.
    scores = 12 * depth * inner * shape.sequence_length * attention_share
    if convention == "parameters":
        return (8 if again else 6) * shape_parameters(shape)
    if convention == "attention":
        return 6 * shape_parameters(shape) + scores
    blocks = 6 * shape.depth * block_weights(shape).matrices
    blocks += 6 * shape.decoder_layers * cross_attention(shape)
    head = 6 * shape.vocab_size * shape.hidden
    if convention == "model":
        return blocks + scores + head
    if convention == "hardware":
        selective = scores / 3 if checkpointing == "selective" else 0
        return (blocks + scores) * (4 / 3 if again else 1) + selective + head
    raise ValueError(f"convention {convention!r} is not one of {', '.join(CONVENTIONS)}")


def share_of_step(shape: ModelShape, attention_share: float) -> float:
    """Return the FLOPs of a step with sparse attention, relative to dense attention.

    Scores under a causal mask count half, as kernels compute them.

    Args:
        shape: the model.
        attention_share: computed share of the scores.
    """
    without = token_flops(shape, "model", attention_share=0)
    scores = (token_flops(shape, "model") - without) * (0.5 if shape.causal else 1)
    return (without + scores * attention_share) / (without + scores)
