"""Text and token files, encoded to memory-mapped tokens; synthetic tasks; the order in which steps read them. No
torch.
"""

from speedlab.data.epoch_sampler import Epochs
from speedlab.data.packing import separated
from speedlab.data.prepare_corpus import Corpus, check, prepare
from speedlab.data.sampler import Sampler
from speedlab.data.synthetic_tasks import Task, accuracy, task_of
from speedlab.data.token_file import write_tokens
from speedlab.data.tokenizer import Tokenizer, save_tokenizer

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
