"""train.data_parallel=auto: into how many groups GPUs are divided, by simulating each number of groups that can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sp_bench.errors import RequestError
from sp_bench.plan.patterns import divisors
from sp_bench.point.request import resolve
from sp_bench.point.training import simulate_training
from sp_bench.reading import Count, read
from sp_bench.records import Record
from sp_bench.workload import Train, workload_named
from sp_bench.workload.training import UPDATE

AUTO = "auto"


def is_asked(config: Mapping[str, Any]) -> bool:
    """Whether the config leaves the number of groups to the simulation, and trains."""
    kind = workload_named(str(config["workload"]))
    if config["train"].get("data_parallel") != AUTO or not issubclass(kind, Train):
        return False
    return UPDATE in kind.phases_of(str(config["phase"]))


def with_groups(config: Mapping[str, Any], groups: int) -> dict[str, Any]:
    """The config with so many data-parallel groups."""
    return {**config, "train": {**config["train"], "data_parallel": groups}}


def chosen(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the number of groups whose simulated step has most tokens per second, of those that fit.

    Raises RequestError if none fits or can be simulated, with what the one of most ranks says.
    """
    if config["mode"] not in ("auto", "simulate"):
        rule = "is simulated only: measured ranks share one sequence"
        raise RequestError("train.data_parallel=auto", rule, "mode=simulate would work")
    if config["seqlen"] == "max":
        rule = "needs a length, which seqlen=max doesn't give"
        raise RequestError("train.data_parallel=auto", rule, "train.data_parallel=1 would work")
    gpus, degree = read(Count, config["gpus"], "gpus"), config["train"]["tensor_parallel"]
    degree = read(Count, degree, "train.tensor_parallel")
    best: tuple[float, int] | None = None
    refused: RequestError | None = None
    for groups in divisors(gpus // degree):
        outcome = _simulated(with_groups(config, groups))
        if isinstance(outcome, RequestError):
            refused = refused or outcome
        elif best is None or (outcome.tokens_per_s or 0.0) > best[0]:
            best = outcome.tokens_per_s or 0.0, groups
    if best is None:
        assert refused is not None
        raise refused
    return with_groups(config, best[1])


def _simulated(config: Mapping[str, Any]) -> Record | RequestError:
    try:
        return simulate_training(resolve({**config, "mode": "simulate", "trace": 0}))
    except RequestError as error:
        return error
