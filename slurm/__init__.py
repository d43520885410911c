"""Run benchmark points as SLURM job arrays, and a SLURM on this machine to try them."""
