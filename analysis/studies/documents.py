"""Packed documents: which method and dealing to choose, what is sent, and how even the work is. A study of ours.

All times are simulated. Work, volumes and bounds on them are computed from the plans.
"""

from __future__ import annotations

from sp_bench.analysis.studies.documents_bounds import bounds, shares
from sp_bench.analysis.studies.documents_maps import maps, points, winners

SECTIONS = (points, maps, bounds, winners, shares)
