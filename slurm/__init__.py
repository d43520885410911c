"""Run benchmark points as SLURM job arrays, and a SLURM on this machine to try them."""

from sp_bench.checkout import one_name

one_name(__name__)
