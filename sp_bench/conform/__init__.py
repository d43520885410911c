"""Conformance: does somebody's sequence-parallel attention hold what attention must hold?

    python -m sp_bench.conform my_module:fn        pytest --sp-conform my_module:fn

Importing this package imports no torch.
"""

from sp_bench.conform.claims import Claims, claims

__all__ = ["Claims", "claims"]
