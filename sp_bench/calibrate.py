"""python -m sp_bench.calibrate [key=value ...]

Measures the costs of this machine's block kernels, folds, copies and links between rank processes, and writes a cluster
file. `python -m sp_bench cluster=NAME` then measures on this machine and chooses tiles by these figures; with
mode=simulate it simulates the machine. cluster=shaped also makes that cluster's hosts and measures their links. With
device=cuda one GPU's kernels are measured, and the links of each pair of GPUs over NCCL; what else a cluster file says
of its network comes from another one.

  name=calibrated   the cluster's name
  out=null          the file; null: cluster/NAME.yaml in $XDG_CONFIG_HOME/sp_bench, by default ~/.config/sp_bench,
                    where cluster=NAME finds it. In another folder it should be FOLDER/cluster/NAME.yaml, for
                    --config-dir FOLDER
  cluster=null      a cluster with hosts, to measure these too; null: ranks talk over loopback.
                    With device=cuda: the cluster whose links the file takes; null: one with such GPUs
  device=auto       cpu or cuda; auto: cuda if this machine has a GPU and cluster=null
  kernel=auto       as in conf/kernel
  head_dim=null     the head_dim of the measured blocks; null: 64, or 128 with device=cuda
  heads=null        null: 8, or 32 with device=cuda
  kv_heads=null     fewer than heads for GQA; null: as many
  ranks=auto        rank processes that share the links; auto: as many as cores, from 2 to 16, or 16 with hosts. With
                    device=cuda one for each GPU, of all hosts in a launch
  repetitions=null  null: 5, or 3 if quick
  sustained_s=0     seconds for which each block is computed before it is timed. In a long step a GPU is at its power
                    limit, and slower than one that has rested. On a GPU 0.2 adds about six minutes
  quick=false       small blocks and messages, for a try: seconds instead of minutes
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from msgspec import Meta

from sp_bench import records
from sp_bench.calibrating.cluster_file import blocks_spread, cluster_config
from sp_bench.calibrating.gpu_file import MARK, above_peak, base_cluster, gpu_cluster_config
from sp_bench.calibrating.setting import Setting, pairs_of
from sp_bench.cli.arguments import only_keys, run_command
from sp_bench.cli.drive import drive
from sp_bench.cluster import Cluster
from sp_bench.cluster.emulation import EmulatedHosts, hosts_of, lab_module, refuse_hosts
from sp_bench.errors import RequestError, unknown
from sp_bench.extras import require
from sp_bench.launch import launched
from sp_bench.machine import Devices, cores_here, gpus_here
from sp_bench.measure.pool import RankError, RankFailure, RankPool
from sp_bench.measure.ranks import open_ranks, ranks_by_host
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem
from sp_bench.point.mode import AskedDevice
from sp_bench.reading import Count, NotNegative, read
from sp_bench.resources import CONF, conf_content, conf_files, user_conf
from sp_bench.terminal import say

if TYPE_CHECKING:
    from sp_bench.calibrating.pairs import PairRate

COMMAND = ("calibrate", "name=calibrated quick=false", "measures this machine and writes a cluster file")

DEFAULTS: dict[str, Any] = {
    "name": "calibrated", "out": None, "cluster": None, "device": "auto", "kernel": "auto", "head_dim": None,
    "heads": None, "kv_heads": None, "ranks": "auto", "repetitions": None, "sustained_s": 0, "quick": False,
}  # fmt: skip
CPU = Setting(
    device="cpu", kernel="auto", dtypes=("float32", "bfloat16"), heads=8, kv_heads=8, head_dim=64,
    sizes=(256, 512, 1024, 2048, 4096), launch_tokens=1, memory_tokens=4096, repetitions=5, message_bytes=4 * 2**20,
)  # fmt: skip
GPU = replace(
    CPU, device="cuda", dtypes=("bfloat16", "float16"), heads=32, kv_heads=32, head_dim=128,
    sizes=tuple(2**power for power in range(9, 17)), launch_tokens=16, memory_tokens=65536,
)  # fmt: skip
QUICK_SIZES = {"cpu": (64, 128), "cuda": (512, 1024)}
HOSTED_RANKS = 16
GPU_PATIENCE_S = 300.0
"""Seconds a rank may be silent: the first call of some kernels compiles them."""
LANES, LARGE_BYTES = 2, 64 * 2**20
"""The lanes on which each pair of GPUs is measured, and the bytes of a large message between them."""
BUSY = 0.1
"""The spread of block times above which their medians can't be trusted."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code. Under srun or torchrun, rank 0 runs it, the others are its ranks."""
    return drive(lambda: calibrate(argv))


def calibrate(argv: list[str] | None = None) -> int:
    """Run the command line in the process that drives the ranks; return the exit code."""
    return run_command("sp_bench.calibrate", __doc__ or "", _calibrate, argv)


def _calibrate(arguments: list[str]) -> int:
    require("run", "calibrating")
    try:
        options = _options(arguments)
        setting, path, name = _setting(options), _path(options), str(options["name"])
        kept = [argument for argument in arguments if not argument.startswith("out=")]
        command = " ".join(["python -m sp_bench.calibrate", *kept])
        if setting.device == "cuda":
            config = _measure_gpu(name, setting, options["cluster"], command)
        else:
            hosts = _hosts(options["cluster"])
            ranks = _ranks(options["ranks"], hosts)
            config = _measure(name, setting, ranks, command)
            if hosts:
                quick = read(bool, options["quick"], "quick")
                calibrate = lab_module(hosts.lab, "calibration").calibrated
                config = calibrate(config, hosts, setting, ranks, quick=quick)
        Cluster.build(config)
        _write(path, config)
    except RankFailure as error:
        if isinstance(error, RankError) and isinstance(error.cause, RequestError):
            raise error.cause from None  # a kernel refused, inside a rank
        say(f"sp_bench.calibrate: {error}")
        return 1
    print(f"{path}: {_how_to_use(path)}")
    return 0


def _options(arguments: list[str]) -> dict[str, Any]:
    """The options with their defaults. Raises RequestError for an invalid argument."""
    options, given = dict(DEFAULTS), only_keys(arguments, DEFAULTS)
    for key, value in given.items():
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise RequestError(f"{key}={value}", "is not YAML", f"{key}={DEFAULTS[key]} would work") from None
    if options["out"] and "name" not in given:
        options["name"] = Path(str(options["out"])).stem
    return options


def _setting(options: dict[str, Any]) -> Setting:
    """Read what is to be measured. Raises RequestError for an invalid value, or without the GPU that is asked for."""
    device = _device(options)
    setting = replace(GPU if device == "cuda" else CPU, kernel=str(options["kernel"]))
    if read(bool, options["quick"], "quick"):
        setting = replace(setting, sizes=QUICK_SIZES[device], repetitions=3, message_bytes=2**20)
    counts = ("heads", "kv_heads", "head_dim", "repetitions")
    given = {key: read(Count, options[key], key) for key in counts if options[key] is not None}
    setting = replace(setting, **{"kv_heads": given.get("heads", setting.heads), **given})
    setting = replace(setting, sustained_s=read(NotNegative, options["sustained_s"], "sustained_s"))
    if setting.heads % setting.kv_heads:
        rule = f"must divide heads={setting.heads}"
        raise RequestError(f"kv_heads={setting.kv_heads}", rule, f"kv_heads={setting.heads} would work")
    return setting


def _device(options: dict[str, Any]) -> str:
    device, gpus = read(AskedDevice, options["device"], "device"), gpus_here()
    if device == "auto":
        return "cuda" if gpus and options["cluster"] is None else "cpu"
    if device == "cuda" and not gpus:
        cores = cores_here()
        has = f"this machine has no GPU, but {cores} CPU core{'' if cores == 1 else 's'}"
        raise RequestError("device=cuda", has, "device=cpu would work")
    if device == "cuda" and options["ranks"] != "auto":
        rule = "on GPUs there is one rank for each"
        raise RequestError(f"ranks={options['ranks']}", rule, "ranks=auto would work")
    return device


def _hosts(cluster: Any) -> EmulatedHosts | None:
    """The emulated hosts of a cluster. Raises RequestError if it has none, or this machine can't make them."""
    if cluster is None:
        return None
    known = conf_files("cluster")
    if cluster not in known:
        raise unknown("cluster", str(cluster), known)
    hosts = hosts_of(conf_content(known[cluster], known))
    if hosts is None:
        raise RequestError(f"cluster={cluster}", "has no hosts, which could be made here", "cluster=shaped would work")
    refuse_hosts(hosts)
    return hosts


def _ranks(value: Any, hosts: EmulatedHosts | None) -> int:
    """The number of ranks. Raises RequestError for fewer than two, or if they don't fill two or more hosts."""
    if value != "auto":
        ranks = read(Annotated[int, Meta(ge=2, examples=[2])], value, "ranks")
    else:
        ranks = HOSTED_RANKS if hosts else min(max(cores_here(), 2), 16)
    together = hosts.network()["gpus_per_node"] if hosts else 1
    if ranks % together or ranks == together:
        rule = f"must fill two or more hosts of {together} ranks"
        raise RequestError(f"ranks={ranks}", rule, f"ranks={2 * together} would work")
    return ranks


def _path(options: dict[str, Any]) -> Path:
    """The file to write. Raises RequestError if it can't be written, or is not one of this command's."""
    name, out = str(options["name"]), options["out"]
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise RequestError(f"name={name}", "must be a word of letters, digits and _", "name=calibrated would work")
    path = user_conf() / "cluster" / f"{name}.yaml" if out is None else Path(str(out))
    key = f"name={name}" if out is None else f"out={out}"
    if out is None and (CONF / "cluster" / path.name).exists():
        raise RequestError(key, "the suite has a cluster of that name", "another name would work")
    if path.suffix != ".yaml":
        raise RequestError(key, "must be a .yaml file", f"out={path}/cluster/{name}.yaml would work")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(key, f"its folder can't be made ({error.strerror})", "out=null would work") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(key, "can't be written", f"out=my_conf/cluster/{name}.yaml would work")
    if path.exists() and not _ours(path):
        raise RequestError(key, "the file exists, and this command didn't write it", "another name would work")
    return path


def _ours(path: Path) -> bool:
    try:
        return MARK in yaml.safe_load(path.read_text())["sources"]
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError):
        return False


def _measure(name: str, setting: Setting, ranks: int, command: str) -> dict[str, Any]:
    with RankPool(ranks) as pool:
        print(f"blocks of {setting.sizes[0]} to {setting.sizes[-1]} tokens, folds, copies", flush=True)
        costs = pool.run("sp_bench.calibrating.kernels:measure_kernels", setting)[0]
        print(f"links between {ranks} ranks", flush=True)
        links = pool.run("sp_bench.calibrating.links:measure_links", setting)
    if (spread := blocks_spread(costs)) > BUSY:
        print(f"block times vary by {spread:.0%}: the machine is busy; calibrate again when it is idle")
    return cluster_config(name, setting, costs, links, _provenance(command))


def _measure_gpu(name: str, setting: Setting, cluster: Any, command: str) -> dict[str, Any]:
    with RankPool(1, GPU_PATIENCE_S) as pool:
        gpu = pool.run("sp_bench.calibrating.kernels:describe_gpu")[0]
        base = base_cluster(gpu.name, cluster, conf_files("cluster"))
        print(f"{gpu.name}: blocks of {setting.sizes[0]} to {setting.sizes[-1]} tokens, folds, copies", flush=True)
        costs = pool.run("sp_bench.calibrating.kernels:measure_kernels", setting)[0]
    pairs, hosts = _measure_pairs(setting)
    config = gpu_cluster_config(name, setting, costs, gpu, base, _provenance(command), pairs, hosts)
    if beyond := above_peak(config["device"]):
        print(
            f"rates above the peak of {gpu.name}, because launch_s is too large a part of the time: {', '.join(beyond)}"
        )
    return config


def _measure_pairs(setting: Setting) -> tuple[list[PairRate], dict[str, list[int]]]:
    """The rates of pairs of GPUs, of the launch or of this machine, and the ranks on each host; none of one GPU."""
    launch = launched()
    n = launch.n if launch else gpus_here()
    if n == 1:
        return [], {}
    print(f"links between {n} GPUs, a pair at a time", flush=True)
    with open_ranks(n, GPU_PATIENCE_S, launch, devices=Devices(kind="cuda")) as pool:
        hosts, message_bytes = ranks_by_host(pool), LARGE_BYTES if setting.message_bytes > 2**20 else 2**20
        job = "sp_bench.calibrating.pairs:pair_rates"
        by_rank = pool.run(job, _two_lanes(n), pairs_of(n), message_bytes, LANES)
    return [pair for of_rank in by_rank for pair in of_rank], hosts


def _two_lanes(n: int) -> dict[str, Plan]:
    """Plans with messages among all ranks on two lanes."""
    problem = Problem(n=n, seqlen=128 * n, heads=1, kv_heads=1, head_dim=16, mask=FULL, layout=LAYOUTS["contiguous"])
    method = build("tokenring", {}).candidates(problem)[0]
    return {"forward": method.plan(method.assigned(problem), "forward", COMPUTE_BOUND)}


def _provenance(command: str) -> dict[str, str]:
    """When, by what and on which hardware the file was made. The host's name is left out."""
    machine, code = records.machine(), records.provenance()
    commit = f"{code['git_commit']}{' with changes' if code['git_dirty'] else ''}" if code["git_commit"] else "unknown"
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        MARK: f"{when} by `{command}`, git commit {commit}",
        "machine": f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}",
    }


def _write(path: Path, config: dict[str, Any]) -> None:
    what = (
        "ranks are its processes"
        if config.get("this_machine")
        else "one of its GPUs, and its links as far as sources say that they were"
    )
    text = f"# This machine, as sp_bench.calibrate measured it: {what}.\n"
    figures = {key: value for key, value in config.items() if key != "sources"}
    text += yaml.safe_dump(figures, sort_keys=False, width=118, default_flow_style=None)
    text += yaml.safe_dump({"sources": config["sources"]}, sort_keys=False, width=118)
    records.write_whole(path, text)


def _how_to_use(path: Path) -> str:
    use = f"python -m sp_bench cluster={path.stem}"
    if path.parent == user_conf() / "cluster":
        return f"{use} gpus=2 would use it"
    if path.parent.name == "cluster":
        return f"{use} --config-dir {path.parent.parent} gpus=2 would use it"
    return "in a folder named cluster, with --config-dir its parent, it would be found"


if __name__ == "__main__":
    sys.exit(main())
