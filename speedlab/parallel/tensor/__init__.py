"""Tensor parallelism: each rank holds a part of every large matrix, and the ranks share what they compute."""

from speedlab.parallel.tensor.heads import attention_dropout
from speedlab.parallel.tensor.parts import put, take
from speedlab.parallel.tensor.plans import check_plan, find_plan, within
from speedlab.parallel.tensor.styles import PlanError
from speedlab.parallel.tensor.tensor import TensorParallel

__all__ = ["PlanError", "TensorParallel", "attention_dropout", "check_plan", "find_plan", "put", "take", "within"]
