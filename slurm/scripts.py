"""sbatch scripts: one job array for each number of GPUs, with the resources it needs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from sp_bench.resources import ROOT
from sp_bench.slurm import queue
from sp_bench.slurm.folder import Sweep
from sp_bench.slurm.points import Task, by_gpus
from sp_bench.slurm.settings import Settings

TERM_S = 30
"""Seconds before its time limit at which a task gets SIGTERM."""


def scripts(sweep: Sweep) -> dict[int, str]:
    """The text of each script, by the number of GPUs."""
    return {gpus: script(sweep, gpus, tasks) for gpus, tasks in by_gpus(sweep.tasks).items()}


def summary(sweep: Sweep) -> str:
    """A submission in words: tasks, points, nodes, the most GPU hours, account; and a container's needs."""
    settings, groups = sweep.settings, by_gpus(sweep.tasks)
    points = sum(len(task.points) for task in sweep.tasks)
    most = max(map(settings.nodes, groups))
    text = f"{len(groups)} job arrays, {len(sweep.tasks)} tasks, {points} points; up to {most} nodes a task"
    if limit_s := queue.seconds(settings.time):
        hours = sum(gpus * len(tasks) for gpus, tasks in groups.items()) * limit_s / 3600
        text += f"; at most {hours:.4g} GPU hours, if each task takes its {settings.time}"
    text += f"; account {settings.account or 'by default'}, partition {settings.partition or 'by default'}"
    if settings.container:
        text += f"; the image needs what {ROOT} imports: it is mounted and needs no install, its dependencies do"
    return text


def write(sweep: Sweep) -> None:
    """Write the scripts into the sweep's folder."""
    for gpus, text in scripts(sweep).items():
        path_of(sweep, gpus).write_text(text)


def path_of(sweep: Sweep, gpus: int) -> Path:
    """The path of the script for points of that many GPUs."""
    return sweep.folder / "scripts" / f"gpus-{gpus}.sbatch"


def script(sweep: Sweep, gpus: int, tasks: Sequence[Task]) -> str:
    """The script of a job array of `tasks`, each on `gpus` GPUs."""
    parts = [
        ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(sweep, gpus, tasks))],
        [f"module load {' '.join(sweep.settings.modules)}"] if sweep.settings.modules else [],
        list(sweep.settings.environment),
        [f"export {name}={shlex.quote(str(value))}" for name, value in sweep.settings.variables.items()],
        _caches(sweep.settings),
        [f"cd {shlex.quote(str(ROOT))}"],
        [_srun(sweep, gpus)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def array(settings: Settings, tasks: Iterable[Task]) -> str:
    """sbatch's --array option: the numbers of tasks, and how many may run at a time, such as 0-3,7%2."""
    return in_short(task.number for task in tasks) + (f"%{settings.most_at_once}" if settings.most_at_once else "")


def in_short(numbers: Iterable[int]) -> str:
    """Numbers as SLURM writes them, such as 0-3,7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _options(sweep: Sweep, gpus: int, tasks: Sequence[Task]) -> list[str]:
    settings, nodes = sweep.settings, sweep.settings.nodes(gpus)
    per_node = -(-gpus // nodes)
    return [
        f"--job-name={sweep.name}-{gpus}",
        f"--array={array(settings, tasks)}",
        f"--nodes={nodes}",
        f"--ntasks={gpus}",
        f"--ntasks-per-node={per_node}",
        f"--gres=gpu:{per_node}",
        *([f"--cpus-per-task={settings.cpus_per_task}"] if settings.cpus_per_task else []),
        *([f"--mem={settings.mem}"] if settings.mem is not None else []),
        *([f"--account={settings.account}"] if settings.account else []),
        *([f"--partition={settings.partition}"] if settings.partition else []),
        f"--time={settings.time}",
        f"--output={sweep.folder}/logs/%A_%a.txt",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{TERM_S}",
        *settings.sbatch,
    ]


def _srun(sweep: Sweep, gpus: int) -> str:
    """The srun line that measures a task's points, with a process for each GPU."""
    settings = sweep.settings
    options = [f"--ntasks={gpus}", "--kill-on-bad-exit=1", NEIGHBOURS, *_binding(settings), *settings.srun]
    options += _container(settings, sweep.folder)
    command = [settings.python, "-m", "sp_bench.slurm.task", str(sweep.folder)]
    words = ["srun", *map(shlex.quote, (*options, *command)), '"$SLURM_ARRAY_TASK_ID"']
    return " \\\n    ".join(_lines(words))


def _lines(words: Iterable[str]) -> list[str]:
    """Words of a command in lines of at most 74 characters, or of one word."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < 74:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


NEIGHBOURS = "--distribution=block:block"
"""A node's ranks, in order, fill one socket and then the next, as its GPUs do. SLURM would take sockets in turn."""


def _binding(settings: Settings) -> list[str]:
    """A rank stays on its cores and their memory; all ranks see all GPUs of their node, as NCCL needs for NVLink."""
    if not settings.cpus_per_task:
        return []
    return [f"--cpus-per-task={settings.cpus_per_task}", "--cpu-bind=cores", "--mem-bind=local", "--gpu-bind=none"]


def _caches(settings: Settings) -> list[str]:
    if not settings.cache:
        return []
    return [
        f'export TRITON_CACHE_DIR="{settings.cache}/triton"',
        "export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1",
        f'export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR="{settings.cache}/flash_attn_4"',
    ]


def _container(settings: Settings, folder: Path) -> list[str]:
    if not settings.container:
        return []
    own = [f"{path}:{path}" for path in (ROOT, folder)]
    mounts = ",".join([*settings.container.mounts, *own])
    return [
        f"--container-image={settings.container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={ROOT}",
    ]
