"""Training points and their workloads, as ranks get them."""

from __future__ import annotations

from sp_bench.cli.compose import Composer
from sp_bench.methods import REGISTRY
from sp_bench.point import Request, resolve
from sp_bench.point.choose import choose_attentions
from sp_bench.point.measured import spec_of
from sp_bench.workload import Spec

METHODS = tuple(name for name in REGISTRY if name != "reference")


def point(*overrides: str) -> Request:
    """A point of the command line; model=tiny on this machine if nothing else is said."""
    given = {override.partition("=")[0] for override in overrides}
    usual = ("model=tiny", "cluster=local", "dtype=float64", "seqlen=64")
    with Composer() as composer:
        return resolve(composer.compose([*(o for o in usual if o.partition("=")[0] not in given), *overrides]))


def training(*overrides: str) -> Spec:
    """The part of such a point that ranks get, with the plans of the chosen variant."""
    request = point(*overrides)
    return spec_of(request, choose_attentions(request))


def prompting(*overrides: str) -> Spec:
    """The same of workload=prefill, with the plans of each chunk."""
    request = point("model=none", "workload=prefill", "head_dim=16", *overrides)
    return spec_of(request, choose_attentions(request))
