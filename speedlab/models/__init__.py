"""The GPT in plain PyTorch, and sampling from it. Models do not know of ranks."""

from speedlab.models.generate import generate
from speedlab.models.gpt import GPT, GPTBlock, GPTOutput

__all__ = ["GPT", "GPTBlock", "GPTOutput", "generate"]
