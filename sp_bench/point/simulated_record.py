"""The record of a simulated point, whatever its workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sp_bench.point.backing import Validation
from sp_bench.point.counted import Counted, rates
from sp_bench.point.request import Request
from sp_bench.point.variants import Choice
from sp_bench.records import Record
from sp_bench.records.quantities import Breakdown, Memory, Timing, Traffic
from sp_bench.records.record import Part

BY_KIND = (
    "one rank stands for all whose blocks take nearly as long, as all of them would be too many to simulate; with all"
    " of fewer ranks, steps of such plans came out up to 3.3% longer"
)


def simulated_record(
    request: Request,
    choice: Choice,
    plans: Counted,
    validation: Validation,
    *,
    step_ms: float,
    phases_ms: Mapping[str, float],
    inside: Breakdown,
    traffic: Traffic,
    memory: Memory,
    others: Iterable[Part] = (),
    notes: Iterable[str] = (),
) -> Record:
    """The record of the simulated step of the chosen plans, with the figures behind its times and what backs them.

    `phases_ms` are by phase. `others` are further parts of the record. `notes` come after the request's, those of its
    cluster, and that of ranks that stand for others (simulate.Run.by_kind).
    """
    device = request.cluster.device
    figures = {"kernel": device.figures(choice.problem), "implementation": device.implementation.name}
    medians = {f"{phase}_ms_median": phase_ms for phase, phase_ms in phases_ms.items()}
    parts = (
        request.asked(),
        replace(plans.setup, **figures, **validation.setup()),
        Timing(step_ms_median=step_ms, **validation.ends(step_ms), **medians),
        rates(request, step_ms, plans.setup.device_name),
        traffic,
        inside,
        memory,
        *others,
    )
    stand_for_others = any(run.by_kind for each in choice.attentions for run in each.runs.values())
    notes = [*request.notes, *request.cluster.notes(choice.problem), *[BY_KIND] * stand_for_others, *notes]
    return request.record("incorrect" if plans.wrong else "ok", plans.wrong or None, *parts, notes=notes)
