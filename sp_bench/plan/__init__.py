"""The plan vocabulary: pure Python, no torch. A method imports this and nothing else of the suite."""

from sp_bench.plan.costs import COMPUTE_BOUND, CostProfile
from sp_bench.plan.dataflow import Dataflow, dataflow
from sp_bench.plan.layout import LAYOUTS, Layout, Mask, Part, Region, Regions, layout_named, window
from sp_bench.plan.method import PHASES, Method
from sp_bench.plan.ops import (
    BLOCKS,
    Attend,
    AttendBackward,
    Chunk,
    Fold,
    Group,
    Op,
    Pass,
    Plan,
    PlanError,
    Steps,
)
from sp_bench.plan.patterns import receive_next, reduce_next
from sp_bench.plan.problem import DTYPE_BYTES, FIELDS, Field, Kind, Problem

__all__ = [
    "BLOCKS",
    "COMPUTE_BOUND",
    "DTYPE_BYTES",
    "FIELDS",
    "LAYOUTS",
    "PHASES",
    "Attend",
    "AttendBackward",
    "Chunk",
    "CostProfile",
    "Dataflow",
    "Field",
    "Fold",
    "Group",
    "Kind",
    "Layout",
    "Mask",
    "Method",
    "Op",
    "Part",
    "Pass",
    "Plan",
    "PlanError",
    "Problem",
    "Region",
    "Regions",
    "Steps",
    "dataflow",
    "layout_named",
    "receive_next",
    "reduce_next",
    "window",
]
