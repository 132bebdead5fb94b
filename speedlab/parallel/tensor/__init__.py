"""Tensor parallelism: each rank holds a shard of every large matrix."""

from speedlab.parallel.tensor.heads import attention_dropout
from speedlab.parallel.tensor.slicing import put, take
from speedlab.parallel.tensor.tensor_parallel import TensorParallel
from speedlab.parallel.tensor.tp_plan import PlanError, check_plan, find_plan, within

__all__ = ["PlanError", "TensorParallel", "attention_dropout", "check_plan", "find_plan", "put", "take", "within"]
