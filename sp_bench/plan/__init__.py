"""The plan vocabulary: all that a method imports from the suite. Pure Python, no torch."""

from sp_bench.errors import RequestError, impossible, unknown
from sp_bench.plan.assignments import ASSIGNMENTS, AssignedLayout
from sp_bench.plan.cast_rows import members_seen
from sp_bench.plan.casts import rows_seen_elsewhere
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.fuse import one_block
from sp_bench.plan.groups import DOWN, UP, Exchange, Grid, Group
from sp_bench.plan.layout import Layout
from sp_bench.plan.method import OPEN_LAYOUTS, CollectiveMethod, Method, ScheduleTime, Sized, SplitsHeads
from sp_bench.plan.ops import (
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Fold,
    Gathered,
    GroupCast,
    GroupReduce,
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
    BACK,
    all_gather,
    divisors,
    line_of,
    receive_next,
    reduce_next,
    reduce_scatter,
    return_home,
    tree_reduce,
)
from sp_bench.plan.problem import Problem
from sp_bench.plan.row_sums import send_row_sums, without_o
from sp_bench.plan.tensors import DKV, DO, DOQ, DQ, KV, ODOQ, OUT, O, Q, Tensor
from sp_bench.plan.travel import key_rows_elsewhere, queries_are_cheap, query_rows_elsewhere

__all__ = [
    "ASSIGNMENTS", "BACK", "DKV", "DO", "DOQ", "DOWN", "DQ", "KV", "ODOQ", "OPEN_LAYOUTS", "OUT", "UP", "AllToAll",
    "AssignedLayout", "Attend", "AttendBackward", "Bundle", "Chunk", "CollectiveMethod", "CostProfile", "Exchange",
    "Fold", "Gathered", "Grid", "Group", "GroupCast", "GroupReduce", "Join", "Layout", "Line", "Method", "O", "Op",
    "Pass", "Plan", "Problem", "Q", "RequestError", "RowSums", "ScheduleTime", "Sized", "SplitsHeads", "Steps",
    "Tensor", "all_gather", "divisors", "impossible", "inner", "key_rows_elsewhere", "line_of", "members_seen",
    "one_block", "outer", "queries_are_cheap", "query_rows_elsewhere", "receive_next", "reduce_next", "reduce_scatter",
    "return_home", "rows_seen_elsewhere", "send_row_sums", "tree_reduce", "unknown", "without_o",
]  # fmt: skip
