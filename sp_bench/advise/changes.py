"""Changes of the answer: the same question with another NIC rate, other key heads, other lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sp_bench.advise.candidates import Answer, Feasible, Question, answers, decodes
from sp_bench.advise.progress import Show, unseen
from sp_bench.advise.workers import Map
from sp_bench.plan.documents import Documents
from sp_bench.plan.patterns import divisors
from sp_bench.point.given import Given
from sp_bench.reading import Tokens, read

TRIED = 3
"""How many of the fastest methods are asked again, beside those that tie with the first."""
ALIKE = 1e-8
"""A step is shorter than another by more than this part of it: bounds and simulated times are rounded."""


@dataclass(frozen=True)
class Change:
    """Another question, and its answer."""

    what: str
    """The difference, in words."""
    first: Feasible | None
    """The fastest then; None where nothing can run."""
    was_first: Feasible | None
    """Today's fastest then, with its own best degrees; None where it can't run."""
    changes: bool
    """Whether today's fastest is then slower: by more than both intervals, or by any where nothing validates one."""


def changes(
    overrides: Sequence[str], now: Answer, *, memory_bytes: float | None, mapped: Map = map, done: Show = unseen
) -> list[Change]:
    """The answers to the varied questions, among the methods that are fast today."""
    names = [each.method.name for each in now.feasible[: max(TRIED, len(now.tied))]]
    varied = _varied(now.config)
    questions = []
    for changed in varied.values():
        keys = {override.partition("=")[0] for override in changed}
        kept = [override for override in overrides if override.partition("=")[0] not in keys]
        questions.append(Question([*kept, *changed], names))
    asked = partial(answers, memory_bytes=memory_bytes, mapped=mapped, done=done)
    answers_to = []
    for what, then in zip(varied, to_each(questions, asked), strict=True):
        if not then.feasible:
            answers_to.append(Change(what, None, None, True))
            continue
        same = next((each for each in then.feasible if each.method.name == names[0]), None)
        slower = same is None or same not in then.tied
        answers_to.append(Change(what, then.feasible[0], same, slower))
    return answers_to


def to_each(questions: Sequence[Question], asked: Callable[..., list[Answer]]) -> list[Answer]:
    """The answers to questions about the same methods. The first one's step ends others that take as long or longer,
    as another method's plans of the same transfers do.
    """
    firsts = asked([question._replace(methods=question.methods[:1]) for question in questions])
    limits_ms = [(1 - ALIKE) * then.feasible[0].time.step_ms if then.feasible else math.inf for then in firsts]
    if len(questions[0].methods) == 1:
        return firsts
    others = asked([question._replace(methods=question.methods[1:]) for question in questions], limit_ms=limits_ms)
    for first, then in zip(firsts, others, strict=True):
        first.feasible = sorted([*first.feasible, *then.feasible], key=lambda each: each.time.step_ms)
        first.refused |= then.refused
    return firsts


def _varied(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Overrides by what they change."""
    varied: dict[str, list[str]] = {}
    inter = config["cluster"].get("inter") or {}
    if rate := inter.get("bytes_per_s"):
        varied["NICs at half the rate"] = [f"cluster.inter.bytes_per_s={rate / 2}"]
        varied["NICs at twice the rate"] = [f"cluster.inter.bytes_per_s={rate * 2}"]
    of_keys = _of_decoding(config) if decodes(config) else _of_attention(config)
    return varied | of_keys


def _of_attention(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Other key heads, or keys in place of latents, and other lengths."""
    heads, varied = config["heads"], {}
    if config["latent_dim"] is None:
        varied |= _of_key_heads(heads, config["kv_heads"] or heads)
    else:
        as_keys = ["latent_dim=null", "rope_dim=null", f"kv_heads={heads}"]
        varied[f"keys and values of all {heads} heads in place of latents"] = as_keys
    lengths = {key: read(Tokens, config[key], key) for key in ("seqlen", "kv_seqlen") if config[key] is not None}
    if not any(tokens % 4 for tokens in lengths.values()):
        varied[f"a quarter of the length, {lengths['seqlen'] // 4:,}"] = [f"{k}={v // 4}" for k, v in lengths.items()]
    varied[f"four times the length, {4 * lengths['seqlen']:,}"] = [f"{k}={4 * v}" for k, v in lengths.items()]
    return varied


def _of_decoding(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Other key heads, GPUs that share heads, and other caches: more or fewer, longer or shorter."""
    asked = Given.of(config)
    values, varied = asked.values, {}
    latent, degree = config["decode"]["latent"], asked.workload.tensor_parallel(config)
    if not latent:
        varied |= _of_key_heads(values.heads, values.kv_heads)
        shared = [d for d in divisors(values.gpus) if d > degree and values.kv_heads % d == 0]
        for more in shared[:1] + shared[-1:]:
            varied[f"{more} GPUs that share heads"] = [f"decode.tensor_parallel={more}"]
    if isinstance(asked.mask, Documents):  # the sequences and their caches are those of data
        return varied
    cached = values.kv_seqlen or values.seqlen
    if cached % 4 == 0:
        varied[f"caches of a quarter, {cached // 4:,} keys"] = [f"kv_seqlen={cached // 4}"]
    varied[f"caches of four times as many keys, {4 * cached:,}"] = [f"kv_seqlen={4 * cached}"]
    if values.batch > 1:
        varied["one sequence"] = ["batch=1"]
    varied[f"four times the sequences, {4 * values.batch}"] = [f"batch={4 * values.batch}"]
    return varied


def _of_key_heads(heads: int, kv_heads: int) -> dict[str, list[str]]:
    varied: dict[str, list[str]] = {}
    if kv_heads < heads:
        varied[f"as many key heads as heads, {heads}"] = [f"kv_heads={heads}"]
    if kv_heads % 4 == 0:
        varied[f"a quarter of the key heads, {kv_heads // 4}"] = [f"kv_heads={kv_heads // 4}"]
    return varied
