"""From records to tables, figures, studies of papers, and a report."""

from sp_bench.extras import require

require("analysis", __name__)
