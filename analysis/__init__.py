"""Analyses of records: frames, comparisons, pictures, studies of papers, and their report."""

from sp_bench.extras import require

require("analysis", __name__)
