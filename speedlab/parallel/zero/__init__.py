"""ZeRO: units, flat parameters, policies, and the hooks that gather and reduce."""

from speedlab.parallel.zero.comm_groups import ZeroCommGroups
from speedlab.parallel.zero.flat_param import FlatParam
from speedlab.parallel.zero.gradient import Gradient, used_by_any
from speedlab.parallel.zero.inspect import agree_on_gather, forget, gather_partitions, name_of, remember
from speedlab.parallel.zero.module_hooks import map_tensors, tensors_of
from speedlab.parallel.zero.param_slot import ParamSlot
from speedlab.parallel.zero.parameter import UnshardedParameter
from speedlab.parallel.zero.units import Unit, UnitChoice, UnitPlan, plan_units
from speedlab.parallel.zero.zero import Zero

__all__ = [
    "FlatParam",
    "Gradient",
    "ParamSlot",
    "Unit",
    "UnitChoice",
    "UnitPlan",
    "UnshardedParameter",
    "Zero",
    "ZeroCommGroups",
    "agree_on_gather",
    "forget",
    "gather_partitions",
    "map_tensors",
    "name_of",
    "plan_units",
    "remember",
    "tensors_of",
    "used_by_any",
]
