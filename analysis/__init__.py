"""Analyses of records: frames, comparisons, pictures, studies of papers, and their report."""

from sp_bench.checkout import one_name
from sp_bench.extras import require

one_name(__name__)
require("analysis", __name__)
