"""A quick calibration, and what it would have seen on a machine of known rates."""

from __future__ import annotations

from sp_bench.calibrating.setting import Costs, Links, Setting
from sp_bench.plan.method import PHASES

SETTING = Setting(
    device="cpu",
    kernel="auto",
    dtypes=("float32",),
    heads=2,
    kv_heads=2,
    head_dim=16,
    sizes=(64, 128),
    launch_tokens=1,
    memory_tokens=64,
    repetitions=3,
    message_bytes=1000,
)


LAUNCH_S = 1e-6


def samples() -> tuple[Costs, list[Links]]:
    """The samples of a machine of known rates: blocks of 1, 2, 3 ... ms."""
    costs = Costs(kernel="aten_cpu", launch_s=[LAUNCH_S] * 3, fold_bytes=10, fold_s=[2e-6] * 3)
    costs.copy_bytes, costs.copy_s = 8, [3e-6] * 3
    costs.sum_bytes, costs.sum_s = 10, [4e-6] * 3
    costs.product_shape, costs.products_s = (128, 32, 88), {"float32": [1e-4] * 3}
    costs.layers_s = {(phase, n): [n * 1e-5 * (1 + i)] * 3 for i, phase in enumerate(PHASES) for n in SETTING.sizes}
    for phase in PHASES:
        cases = [(f"{phase}_full", q, kv) for q in SETTING.sizes for kv in SETTING.sizes]
        for case in [*cases, *((f"{phase}_causal", size, size) for size in SETTING.sizes)]:
            middle = 1e-3 * (1 + len(costs.blocks_s))
            costs.blocks_s["float32", *case] = [middle / 2, middle, 5 * middle]
    link = Links(
        pair_tiny_s=[1e-4], pair_large_s=[2e-4], ring_tiny_s=[1e-4, 1e-4, 9e-4], ring_large_s=[3e-4, 3e-4, 3e-4]
    )
    link.alone_s, link.beside_s = [1.0, 1.0], [1.5, 1.5]
    slower = Links(ring_tiny_s=[5e-5, 2e-4, 2e-4], ring_large_s=[1e-4, 1.2e-3, 1.2e-3], alone_s=[1.0], beside_s=[])
    return costs, [link, slower]
