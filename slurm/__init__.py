"""Benchmark points as SLURM job arrays, and a SLURM to try them on."""
