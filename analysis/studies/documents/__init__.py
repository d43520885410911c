"""Packed documents: which method and layout to choose, what is sent, and how even the work is. A study of ours.

All times are simulated. Work, volumes and bounds on them are computed from the plans.
"""

from __future__ import annotations

from sp_bench.analysis.studies.documents.casts import even, relayed, travels
from sp_bench.analysis.studies.documents.cells import bounds, maps, points, shares, winners
