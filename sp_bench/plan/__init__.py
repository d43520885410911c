"""The plan vocabulary: all that a method imports from the suite. Pure Python, no torch."""

from sp_bench.errors import RequestError, unknown
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.groups import DOWN, UP, Exchange, Grid, Group
from sp_bench.plan.method import CollectiveMethod, Method, ScheduleTime, Sized
from sp_bench.plan.ops import (
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Fold,
    Join,
    Line,
    Op,
    Pass,
    Plan,
    RowSums,
    Steps,
    inner,
    outer,
)
from sp_bench.plan.patterns import (
    all_gather,
    divisors,
    line_of,
    receive_next,
    reduce_next,
    reduce_scatter,
    return_home,
)
from sp_bench.plan.problem import Problem

__all__ = [
    "DOWN",
    "UP",
    "AllToAll",
    "Attend",
    "AttendBackward",
    "Bundle",
    "Chunk",
    "CollectiveMethod",
    "CostProfile",
    "Exchange",
    "Fold",
    "Grid",
    "Group",
    "Join",
    "Line",
    "Method",
    "Op",
    "Pass",
    "Plan",
    "Problem",
    "RequestError",
    "RowSums",
    "ScheduleTime",
    "Sized",
    "Steps",
    "all_gather",
    "divisors",
    "inner",
    "line_of",
    "outer",
    "receive_next",
    "reduce_next",
    "reduce_scatter",
    "return_home",
    "unknown",
]
