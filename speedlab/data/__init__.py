"""Text and token files in, memory-mapped tokens out; the order in which steps see them. No torch."""

from speedlab.data.corpus import Corpus, check, prepare
from speedlab.data.epochs import Epochs
from speedlab.data.sampler import Sampler
from speedlab.data.tokenizer import Tokenizer, save_tokenizer
from speedlab.data.tokens import write_tokens

__all__ = ["Corpus", "Epochs", "Sampler", "Tokenizer", "check", "prepare", "save_tokenizer", "write_tokens"]
