"""The packages of a wheel: those in sp_bench/, and those beside it in a checkout, which a wheel has inside."""

from setuptools import find_packages, setup

BESIDE = ("analysis", "conf", "methods", "slurm")

setup(
    packages=[
        *find_packages(include=["sp_bench", "sp_bench.*"]),
        *(f"sp_bench.{name}" for top in BESIDE for name in find_packages(include=[top, f"{top}.*"])),
    ],
    package_dir={f"sp_bench.{top}": top for top in BESIDE},
)
