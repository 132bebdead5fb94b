"""Text and token files in, memory-mapped tokens out; synthetic tasks; the order in which steps see them. No torch."""

from speedlab.data.corpus import Corpus, check, prepare
from speedlab.data.documents import separated
from speedlab.data.epochs import Epochs
from speedlab.data.sampler import Sampler
from speedlab.data.tasks import Task, accuracy, task_of
from speedlab.data.tokenizer import Tokenizer, save_tokenizer
from speedlab.data.tokens import write_tokens

__all__ = [
    "Corpus",
    "Epochs",
    "Sampler",
    "Task",
    "Tokenizer",
    "accuracy",
    "check",
    "prepare",
    "save_tokenizer",
    "separated",
    "task_of",
    "write_tokens",
]
