"""The plan vocabulary: pure Python, no torch. A method imports this and nothing else of the suite."""

from sp_bench.errors import RequestError, unknown
from sp_bench.plan.costs import COMPUTE_BOUND, CostProfile
from sp_bench.plan.dataflow import Dataflow, Slot, Value, dataflow
from sp_bench.plan.layout import LAYOUTS, Layout, Mask, Part, Region, Regions, layout_named, window
from sp_bench.plan.method import PHASES, Method
from sp_bench.plan.ops import (
    BLOCKS,
    Attend,
    AttendBackward,
    Chunk,
    Fold,
    Grid,
    Group,
    Join,
    Line,
    Op,
    Pass,
    Plan,
    PlanError,
    Steps,
    inner,
    outer,
)
from sp_bench.plan.patterns import line_of, receive_next, reduce_next, return_home
from sp_bench.plan.problem import DTYPE_BYTES, FIELDS, Field, Kind, Problem, is_partial

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
    "Grid",
    "Group",
    "Join",
    "Kind",
    "Layout",
    "Line",
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
    "RequestError",
    "Slot",
    "Steps",
    "Value",
    "dataflow",
    "inner",
    "is_partial",
    "layout_named",
    "line_of",
    "outer",
    "receive_next",
    "reduce_next",
    "return_home",
    "unknown",
    "window",
]
