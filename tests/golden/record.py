"""The recorded figures: simulated times, counted bytes, bounds and peak memory of points that cover what there is.

python -m tests.golden.record          # records them again, after a change that is meant to change them
python -m tests.golden.record --new    # records the points that have none, such as that of a new method
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sp_bench.__main__ import main as bench
from sp_bench.methods import REGISTRY
from sp_bench.plan.mask import MASKS
from sp_bench.resources import CONF
from sp_bench.workload import WORKLOADS

FILE = Path(__file__).with_name("figures.json")
COUNTS = (
    "tile_a",
    "tile_b",
    "layout",
    "comm_bytes_per_gpu",
    "comm_bytes_busiest_gpu",
    "comm_bytes_expected",
    "comm_bytes_by_lane",
    "peak_mem_bytes_max",
    "bound_by",
)
"""Fields that must be equal."""
TIMES = (
    "step_ms_median",
    "forward_ms_median",
    "backward_ms_median",
    "compute_ms",
    "exposed_comm_ms",
    "rank_idle_ms_max",
    "bound_ms",
    "comm_bytes_lower_bound",
)
"""Fields that may differ by rounding: processors round logarithms and roots differently."""

H100 = "gpus=16 seqlen=256k cluster=h100_ndr400"
CHOSEN = (
    *(f"method={name} {H100}" for name in ("striped", "pass_q", "tokenring", "usp", "loongtrain")),
    *(f"method={name} {H100} kv_heads=8" for name in ("ring", "double_ring", "all_gather", "ulysses")),
    f"method=tasp {H100} kv_heads=8",
    f"method=burst_attention {H100}",
    f"method=upipe {H100} kv_heads=8",
    f"method=ulysses_all_gather {H100} kv_heads=8",
    *(f"method={name} {H100} causal=false" for name in ("zigzag", "startrail", "mesh", "tokenring")),
    *(f"method={name} {H100} method.layout=contiguous" for name in ("ring", "mesh")),
    *(f"method={name} {H100} method.layout=zigzag" for name in ("all_gather", "startrail", "mesh")),
    f"method=usp method.ulysses=4 method.layout=zigzag {H100}",
    f"method=tokenring method.nodes=2 method.layout=zigzag {H100}",
    f"method=tokenring method.nodes=2 method.layout=zigzag method.trim=false {H100}",
    "method=mesh method.schedule=searched method.slices=2 gpus=8 seqlen=128k cluster=h100_ndr400",
    f"method=mesh method.tile=[4,4] method.lanes=each {H100} kv_heads=8",
    "method=mesh method.form=gather method.slices=2 gpus=16 seqlen=32k cluster=h100_ndr400 kv_heads=8",
    "method=reference gpus=1 seqlen=16k cluster=h100_ndr400",
    "method=mesh gpus=256 cluster=h100_ndr400",
    "method=ring gpus=256 cluster=h100_ndr400",
    "method=mesh gpus=64 seqlen=512k cluster=h100_ndr400 cluster.placement=cyclic",
    "method=ring gpus=32 seqlen=256k cluster=h100_ndr400 cluster.fabric={nodes_per_leaf:2,oversubscription:4}",
    "method=mesh gpus=4 seqlen=64k cluster=a10_pcie",
    "method=pass_q gpus=4 seqlen=64k cluster=a10_pcie causal=false",
    "method=zigzag gpus=8 seqlen=64k cluster=ascend_oam phase=forward",
    "method=tokenring gpus=8 seqlen=64k cluster=ascend_oam phase=forward",
    "method=mesh gpus=32 seqlen=512k cluster=b200 wire_dtype=float32",
    "method=mesh gpus=32 seqlen=512k cluster=b200 kernel=flash_attn_4",
    "method=zigzag gpus=8 seqlen=64k cluster=h800 kv_heads=8 kernel=flash_attn",
    "method=zigzag gpus=8 seqlen=64k cluster=h100_ndr400_500w kv_heads=8 implementation=torch_context_parallel",
    "method=usp gpus=8 seqlen=64k cluster=a800 head_dim=64",
    "method=usp gpus=8 seqlen=32k cluster=rtx4090_pcie head_dim=64 phase=forward",
    "method=ring gpus=16 seqlen=64k cluster=tpuv4 head_dim=64",
    "method=ring gpus=16 seqlen=64k cluster=tpuv5p",
    "method=ulysses gpus=8 seqlen=32k cluster=l20_pcie head_dim=32 phase=forward",
    "method=pass_q gpus=8 seqlen=64k cluster=a10_pcie causal=false",
    "method=startrail gpus=32 seqlen=256k cluster=a100_hdr200 stragglers.ranks={3:1.5}",
    "method=ring gpus=32 seqlen=256k cluster=a100_hdr200 stragglers.links={nic:{0:0.5}}",
    "method=usp gpus=16 seqlen=128k cluster=h20 stragglers.jitter=0.05 seed=7",
    "method=mesh gpus=8 seqlen=256k cluster=mesh_paper causal=false",
    "method=ulysses gpus=8 seqlen=128k cluster=h200_ndr400 batch=2",
    "method=mesh gpus=8 seqlen=8k heads=8 head_dim=64 dtype=float32 cluster=cpu_local",
    "method=mesh gpus=16 seqlen=4k heads=8 head_dim=64 dtype=float32 cluster=shaped",
    "method=ulysses gpus=8 seqlen=4k heads=8 head_dim=64 dtype=float32 cluster=shaped",
    f"method=ring mask=document data=short method.layout=striped {H100}",
    f"method=mesh mask=document data=short method.layout=zigzag_documents {H100}",
    f"method=ring mask=document data=short method.layout=whole_documents {H100}",
    f"method=all_gather mask=document data=short method.layout=blocks {H100}",
    f"method=group_cast mask=document data=magi_attention {H100} kv_heads=8 method.layout=balanced",
    f"method=group_cast method.ulysses=2 method.stages=2 {H100} kv_heads=8 method.layout=zigzag",
    f"method=group_cast method.qo_comm=true mask=document data=magi_attention {H100} method.layout=balanced",
    "method=group_cast seqlen=8k kv_seqlen=256k phase=forward gpus=16 kv_heads=8 cluster=h100_ndr400",
    f"method=hybrid_cp mask=document data=magi_attention {H100} kv_heads=8 method.layout=hybrid",
    f"method=mesh mask=window window=[16383,0] method.layout=contiguous {H100}",
    f"method=usp workload=prefill prefill.chunk=64k prefill.cached=32k {H100} kv_heads=8",
    f"method=ring model=llama3_8b workload=prefill prefill.chunk=64k prefill.tensor_parallel=2 {H100}",
    f"method=ring mask=chunked chunk=64k method.layout=zigzag {H100}",
    "method=ring seqlen=16k kv_seqlen=512k mask=window window=[4095,0] phase=forward gpus=16 cluster=h100_ndr400",
    "method=usp model=gpt_oss_20b workload=prefill gpus=8 seqlen=128k prefill.chunk=64k cluster=h100_ndr400",
    "method=tree model=gpt_oss_20b workload=decode gpus=8 batch=16 cluster=h100_ndr400",
    "method=tree model=deepseek_v2_lite workload=decode gpus=8 batch=16 kv_seqlen=64k cluster=h100_ndr400",
    "method=mesh model=minicpm3_4b workload=prefill gpus=8 seqlen=128k prefill.chunk=32k cluster=h100_ndr400",
    "method=mesh mask=window window=[4095,0] method.layout=contiguous model=deepseek_v2_lite workload=attention"
    f" {H100}",
    "method=tree workload=decode gpus=64 batch=32 kv_seqlen=128k heads=32 kv_heads=8 cluster=h100_ndr400",
    "method=pass_q workload=decode gpus=8 batch=3 kv_seqlen=20001 decode.page_tokens=64 kv_heads=8 cluster=h100_ndr400",
    "method=ring model=gpt_oss_20b workload=train train.parameters=sharded gpus=16 seqlen=128k cluster=h100_ndr400",
    "method=ulysses model=flux_like workload=dit phase=forward gpus=8 seqlen=4k cluster=h100_ndr400",
    "method=mesh model=flux_like phase=forward gpus=16 seqlen=16k cluster=h100_ndr400",
    "method=usp model=wan_like gpus=16 seqlen=75600 cluster=h100_ndr400",
)
WHOLE = {"causal": "", "full": "causal=false"}
"""The word of a chosen point on each mask that has a short form; others are named."""


def registered() -> tuple[str, ...]:
    """A point for each registered method, mask, cluster and workload that no chosen point has.

    One that is refused is chosen.
    """
    words = {word for point in CHOSEN for word in point.split()}
    clusters = [path.stem for path in sorted((CONF / "cluster").glob("*.yaml")) if path.stem != "local"]
    workloads = (f"workload={name}" for name in WORKLOADS)
    return (
        *(f"method={name} {H100}" for name in REGISTRY if f"method={name}" not in words),
        *(f"method=mesh mask={name} {H100}" for name in MASKS if WHOLE.get(name, f"mask={name}") not in {*words, ""}),
        *(f"method=mesh gpus=8 seqlen=64k cluster={name}" for name in clusters if f"cluster={name}" not in words),
        *(f"method=mesh model=llama3_8b {word} {H100}" for word in workloads if word not in words),
    )


POINTS = (*CHOSEN, *registered())


def figures(point: str) -> dict[str, Any]:
    """The figures of the record of a simulated point. RuntimeError if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        said = io.StringIO()
        own = ("mode=simulate", "baseline=null", "trace=0", "logger=none", f"results_dir={folder}")
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = bench([*own, *point.split()])
        found = [path for path in Path(folder).glob("*.json") if path.name.count(".") == 1]
        if code or len(found) != 1:
            raise RuntimeError(f"{point}: exit code {code}\n{said.getvalue()}")
        record = json.loads(found[0].read_text())
    return {name: record[name] for name in (*COUNTS, *TIMES) if record[name] is not None}


def main(arguments: Sequence[str]) -> int:
    """Write the figures of all points, or of those without; says which have changed."""
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    kept = before if "--new" in arguments else {}
    now = {point: kept.get(point) or figures(point) for point in POINTS}
    FILE.write_text(json.dumps(now, indent=1) + "\n")
    for point in {**now, **before}:
        if before.get(point) != now.get(point):
            print(f"{'changed' if point in now and point in before else 'new' if point in now else 'gone'}: {point}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
