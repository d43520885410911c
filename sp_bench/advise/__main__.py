"""python -m sp_bench.advise gpus=64 seqlen=1M model=llama3_8b cluster=h100_ndr400 [memory=60GB] [key=value ...]

Which sequence-parallel attention, at which degrees? Every method is simulated at the degrees that are its fastest, and
ranked with the interval that two of three measurements like it are in. Methods whose intervals overlap
that of the fastest are tied: the answer names all of them. What no measurements validate has no interval, and the
answer says so. Then: why the others can't run and, when that is known, what would change the answer, and the settings
of frameworks that have the method.

Packs differ, and so do their steps: with mask=document and a data set (data=magi_attention, data=sample
data.path=lengths.txt), 16 packs are drawn, or packs=N. Methods are ranked by their median step, with the worst one,
and a table says how many ranks a document asks for, by its length. packs=1 asks about one pack, drawn by `seed`.

With batch_tokens=4M (the tokens of a training step; needs model=) it is about the whole job: context x data x tensor
parallelism x method, ranked by tokens per second with the memory of each, and what torchtitan and Megatron-LM call the
settings. What ties is said.

With workload=decode it is about a decode step: the methods that leave caches where they are. With latent_dim=512 (and
v_head_dim, phase=forward, kv_seqlen for a prompt behind a history) latents travel. Neither has measurements like it, so
that nothing has an interval.

Keys are those of `python -m sp_bench` (cluster, gpus, seqlen, batch, heads, kv_heads, head_dim, mask, dtype, phase, and
model, of which one attention is taken), and memory=60GB (what one attention may need on a GPU, in GB or GiB),
plots=FILE.svg (time, memory, volume against the bound), changes=false (don't ask what would change the answer),
every_method=true (on more than 64 GPUs, simulate also those that can't be fast, as their links or blocks show),
method.pad_heads=true (ranks may split heads that their number doesn't divide, with heads of zeros).
--all prints every column. A step in bold is the fastest, or can't be told from it.
Exit codes: 0 ok, 2 a request that can't be served.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from sp_bench.advise import job, job_words, packs_words, plots
from sp_bench.advise.candidates import DECODE, PAD_HEADS, Answer, Question, answer, decodes
from sp_bench.advise.changes import Change, changes
from sp_bench.advise.code import Wanted, command_options
from sp_bench.advise.flags import FRAMEWORKS, settings
from sp_bench.advise.packs import Packs, answer_for_packs, packs_of
from sp_bench.advise.progress import watching
from sp_bench.advise.workers import workers
from sp_bench.cli.arguments import flag, run_command
from sp_bench.cli.columns import make_console, print_columns
from sp_bench.cli.words import amount, over_least
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY
from sp_bench.point.unread import unread
from sp_bench.records import Record
from sp_bench.terminal import fitted, say

COMMAND = (
    "advise",
    "gpus=64 seqlen=1M cluster=... memory=60GB plots=FILE changes=false | batch_tokens=4M",
    "ranks all methods for a cluster, and says how sure that is",
)

UNITS = {"GB": 1e9, "GiB": 2**30, "MB": 1e6, "MiB": 2**20}
ALL = "--all"
WHERE_THERE_IS_ROOM = ("interval", "MFU", "peak mem", "/ least", "bound by", "layout", "sent/GPU", "least, own split")
"""Columns that are left out of a table that would be too wide, those that matter most first."""
OWN = ("memory", "plots", "changes", "packs", "every_method")
OF_ONE_PACK = {"plots", "every_method"}
"""On several packs all methods are simulated."""
BATCH = "batch_tokens"
NOT_ADVISED = ("method", "mode", "workload", "impl", "baseline", "alone")
"""Keys that the advice is about, or that have no meaning for it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        return run_command("sp_bench.advise", __doc__ or "", _advise, argv, [ALL])
    except KeyboardInterrupt:
        say("sp_bench.advise: interrupted")
        return 1


def _refuse(given: Mapping[str, str]) -> None:
    """Raise RequestError for values of keys that advice can't take, before anything is simulated."""
    if PAD_HEADS in given:
        flag(given, PAD_HEADS)
    for key in given.keys() - {ALL, PAD_HEADS}:
        if key.partition(".")[0] in (*NOT_ADVISED, *REGISTRY):
            if key == "workload" and given[key] == DECODE:
                continue
            works = (
                f"leaving it out, or {key}={DECODE}, would work" if key == "workload" else "leaving it out would work"
            )
            raise RequestError(f"{key}={given[key]}", "is what the advice is about", works)
        if key in unread("simulate"):
            rule = "is read by measured points only, and advice simulates"
            raise RequestError(f"{key}={given[key]}", rule, "leaving it out would work")
    if BATCH in given and given.get("workload") == DECODE:
        raise RequestError(f"workload={DECODE}", f"has no {BATCH}, which are of a training step", "batch=16 would work")
    if "plots" in given:
        plots.check(Path(given["plots"]))


def _advise(arguments: Sequence[str]) -> int:
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    _refuse(given)
    if BATCH in given:
        return _advise_job(arguments, given[BATCH])
    overrides = [argument for argument in arguments if argument.partition("=")[0] not in (*OWN, ALL)]
    memory_bytes = size(given["memory"]) if "memory" in given else None
    asked = flag({"changes": True} | given, "changes")
    every = flag({"every_method": False} | given, "every_method")
    console = make_console()
    if packs := packs_of(overrides, given.get("packs")):
        for key in OF_ONE_PACK & given.keys():
            raise RequestError(f"{key}={given[key]}", "is of one pack", "packs=1 would work")
        return _advise_packs(console, overrides, packs, memory_bytes, every=ALL in arguments)
    with workers() as mapped:
        with watching() as done:
            question = Question(overrides)
            advised = answer(question, every=every, memory_bytes=memory_bytes, mapped=mapped, done=done)
        said(console, heading(advised))
        tied = advised.tied
        bold = {i for i, each in enumerate(advised.feasible) if each in tied}
        print_columns(console, ranking(advised), () if ALL in arguments else WHERE_THERE_IS_ROOM, bold=bold)
        said(console, [*backing(advised), *reasons(advised)])
        varied = []
        if asked:
            with watching("what would change it: ", rows=False) as done:
                varied = changes(overrides, advised, memory_bytes=memory_bytes, mapped=mapped, done=done)
    said(console, what_changes(advised, varied))
    for line in how_to(advised, overrides):  # commands and code: to be copied
        console.print(line, soft_wrap=True)
    if "plots" in given:
        plots.write(Path(given["plots"]), advised, memory_bytes)
    return 0


def _advise_packs(
    console: Console, overrides: Sequence[str], packs: Packs, memory_bytes: float | None, *, every: bool
) -> int:
    with workers() as mapped, watching() as done:
        advised = answer_for_packs(Question(overrides), packs, memory_bytes=memory_bytes, mapped=mapped, done=done)
    data = next((each for each in overrides if each.startswith("data=")), f"data={advised.config['data']['kind']}")
    said(console, packs_words.heading(advised, data))
    bold = {i for i, each in enumerate(advised.methods) if each in advised.tied}
    print_columns(console, packs_words.ranking(advised), () if every else packs_words.WHERE_THERE_IS_ROOM, bold=bold)
    if table := packs_words.rank_table(advised.methods):
        said(console, ["", "Ranks that have tokens of a document, by its length in tokens:"])
        print_columns(console, {"length": table.pop("method"), **table})
    said(console, packs_words.too_slow(advised))
    first = Answer(advised.config, [each.feasible for each in advised.methods], advised.refused)
    said(console, [*backing(first), *reasons(first)])
    for line in how_to(first):
        console.print(line, soft_wrap=True)
    return 0


def _advise_job(arguments: Sequence[str], batch_tokens: str) -> int:
    """Advice on a whole training job."""
    for argument in arguments:
        key = argument.partition("=")[0]
        if key in OWN or key in ("train.data_parallel", "train.tensor_parallel", "train.batch_tokens"):
            rule = f"can't be given with {BATCH}, which asks about a whole job"
            raise RequestError(argument, rule, "leaving it out would work")
    kept = [argument for argument in arguments if argument.partition("=")[0] not in (BATCH, ALL)]
    console, every = make_console(), ALL in arguments
    with workers() as mapped, watching() as done:
        advised = job.answer([*kept, f"train.batch_tokens={batch_tokens}"], mapped=mapped, done=done)
    said(console, job_words.heading(advised))
    shown, tied = job_words.shown_jobs(advised, every=every), advised.tied
    bold = {i for i, each in enumerate(shown) if each in tied}
    narrow = () if every else ("recompute", "not hidden", "MFU", "turns")
    print_columns(console, job_words.ranking(advised, every=every), narrow, bold=bold)
    said(console, job_words.refused(advised) if every else [])
    for line in job_words.how_to(advised):  # commands: to be copied
        console.print(line, soft_wrap=True)
    return 0


def said(console: Console, lines: Sequence[str]) -> None:
    """Print lines that fit the console."""
    for line in lines:
        console.print(fitted(line, width=console.width))


def size(text: str) -> float:
    """Bytes from "60GB". Raises RequestError for another form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB|MB|MiB)", text)
    if not match or not float(match[1]):
        raise RequestError(f"memory={text}", "is no size", "memory=60GB, or GiB, would work")
    return float(match[1]) * UNITS[match[2]]


def heading(found: Answer) -> list[str]:
    """The request, the answer, and the figures that it is by."""
    first, record = found.feasible[0], found.feasible[0].record
    lines = [f"{_about(record)}, {packs_words.shape(record)}. All times are simulated.", ""]
    tied = found.tied
    if not first.time.backed:
        lines.append(f"{first.name} is the fastest in simulation. It is not validated: nobody knows how far off it is.")
        tied, of, too = found.tied_validated, "Of the validated methods, ", "too"
    else:
        of, too = "", "Too"
    names = ", ".join(each.name for each in tied)
    if len(tied) == 1:
        lines.append(f"{of}{names} comes first: no other interval reaches its own.")
    elif tied:
        lines.append(f"{of}{too} close to call: {names}. Their intervals overlap that of the fastest.")
    lines.append(f"Kernel rates: {record.kernel}. Measure the first two on your machine.")
    return [*lines, *(f"note: {note}" for note in record.notes or ())]


def _about(record: Record) -> str:
    """The attention, by its tokens and keys."""
    if record.sequences:
        new = "a new token" if record.seqlen == 1 else f"{record.seqlen} new tokens"
        cached = record.kv_seqlen or record.seqlen
        keys = f"{cached:,} keys" if record.mask != "document" else f"{cached:,} keys together"
        sequences = "one sequence" if record.sequences == 1 else f"{record.sequences} sequences"
        return f"The attention of one layer in a decode step: {new} of {sequences} with caches of {keys}"
    more = f" that see {record.kv_seqlen:,} keys" if record.kv_seqlen else ""
    return f"One attention of {record.seqlen:,} tokens{more}"


def _ms(step_ms: float | None) -> str:
    """Milliseconds with a decimal; three digits of fewer than one."""
    return "-" if step_ms is None else f"{step_ms:,.1f}" if step_ms >= 1 else f"{step_ms:.3g}"


def backing(found: Answer) -> list[str]:
    """The measurements behind the intervals of the fastest methods, and the methods without any."""
    lines = [""]
    if of_backed := dict.fromkeys(each.record.validation for each in found.tied if each.time.backed):
        lines += ["An interval has two of three measurements like the point in it:"]
        lines += [f"  {validation}" for validation in of_backed]
    by_reason: dict[str | None, list[str]] = {}
    for each in found.unvalidated:
        by_reason.setdefault(each.record.validation, []).append(each.name)
    if by_reason:
        lines.append("These have no interval, and can't be told apart from any other:")
        lines += [f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return lines


def ranking(found: Answer) -> dict[str, list[str]]:
    """The columns of everything that can run, the fastest first."""
    rows = [(each, each.time, each.record) for each in found.feasible]
    return {
        "method": [each.name for each, _, _ in rows],
        "layout": [r.layout or "-" for _, _, r in rows],
        "step, ms": [_ms(time.step_ms) for _, time, _ in rows],
        "interval": [f"{_ms(time.low_ms)} to {_ms(time.high_ms)}" if time.backed else "-" for _, time, _ in rows],
        "MFU": [f"{r.mfu:.1%}" if r.mfu is not None else "-" for _, _, r in rows],
        "sent/GPU": [
            amount(r.comm_bytes_per_gpu) if r.sequences else f"{(r.comm_bytes_per_gpu or 0) / 1e9:,.2f} GB"
            for _, _, r in rows
        ],
        "least, own split": [amount(r.comm_bytes_lower_bound) for _, _, r in rows],
        "/ least": [over_least(r, r.comm_bytes_least) for _, _, r in rows],
        "peak mem": [f"{(r.peak_mem_bytes_max or 0) / 1e9:,.2f} GB" for _, _, r in rows],
        "bound by": [r.bound_by or "-" for _, _, r in rows],
    }


def reasons(found: Answer) -> list[str]:
    """Why the others can't run, or are not worth simulating."""
    lines = [f"  {name}: {why}" for name, why in found.refused.items()]
    lines = ["", "Not possible:", *lines] if lines else []
    if found.hopeless:
        names = ", ".join(f"{name} {_ms(least_ms)} ms" for name, least_ms in found.hopeless.items())
        lines += ["", f"Not simulated, as they take about so long or longer (every_method=true does): {names}."]
    return lines


def what_changes(found: Answer, varied: Sequence[Change]) -> list[str]:
    """Changes that would, and that wouldn't, change the answer."""
    first = found.feasible[0].method.name
    lines = []
    for change in varied:
        if change.first is None:
            lines.append(f"  {change.what}: nothing fits any more")
        elif change.was_first is None:
            lines.append(
                f"  {change.what}: {first} can't run; {change.first.name}, {_ms(change.first.time.step_ms)} ms"
            )
        elif change.changes:
            slower = change.was_first.time.step_ms / change.first.time.step_ms
            step_ms = change.first.time.step_ms
            lines.append(
                f"  {change.what}: {change.first.name}, {_ms(step_ms)} ms; {first} takes {slower:.2f}x as long"
            )
        else:
            same, fastest = change.was_first.time.step_ms, change.first.name
            best = "the fastest" if change.first.method.name == first else f"tied with {fastest}"
            lines.append(f"  {change.what}: {change.was_first.name} is still {best}, {_ms(same)} ms")
    return ["", "What would change the answer:", *lines] if lines else []


def how_to(found: Answer, overrides: Sequence[str] = ()) -> list[str]:
    """Settings for the fastest, and for the fastest that a framework has under the mask.

    Of a decode step, and of latents, which SequenceParallelAttention doesn't take: the command of the fastest, for a
    question with these overrides.
    """
    lines, first = ["", "How to run it:"], found.feasible[0]
    if decodes(found.config) or first.record.latent_dim:
        what = "decode steps" if decodes(found.config) else "latents"
        asked = " ".join(shlex.quote(each) for each in overrides)
        chosen = " ".join(command_options(Wanted.of(first.method, first.record)))
        missing = f"SequenceParallelAttention takes no {what}, and settings of frameworks are not known here"
        return [*lines, f"  {first.name}: {missing}", f"    python -m sp_bench {asked} {chosen}"]
    for i, each in enumerate(found.feasible):
        texts = settings(Wanted.of(each.method, each.record))
        elsewhere = any(name in FRAMEWORKS for name in texts)
        if i == 0 or elsewhere:
            missing = "" if elsewhere else f" none of {', '.join(FRAMEWORKS)} has it with this mask and shape"
            lines.append(f"  {each.name}:{missing}")
            for name, text in texts.items():
                checked = f" ({FRAMEWORKS[name].checked})" if name in FRAMEWORKS else ""
                lines += [f"    {name}{checked}:", *(f"      {line}" for line in text.splitlines())]
        if elsewhere:
            return lines
    if found.hopeless:
        lines.append("  with every_method=true: what frameworks call the settings of the methods that take longer")
    return lines


if __name__ == "__main__":
    sys.exit(main())
