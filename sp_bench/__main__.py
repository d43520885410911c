"""python -m sp_bench [-m] [--config-dir DIR] key=value ...

Runs one point of the sequence-parallel attention benchmark beside a baseline. The point is measured if this machine has
the hardware it asks for; otherwise it is simulated, and the output says so.

  python -m sp_bench method=mesh gpus=256
  python -m sp_bench method=mesh gpus=4 cluster=local seqlen=8k heads=8 head_dim=64 dtype=float32
  python -m sp_bench -m method=ring,mesh gpus=32,64,128,256

  -m, --multirun    values may be comma-separated lists: one point for each combination, one table at the end
  --config-dir DIR  a folder with your own method/, cluster/ ..., in addition to conf/
  --all             print every quantity and variant; without it, those of a first screen
  --json            print the records to stdout, one JSON object a line, and all else to stderr
  --cfg             print the composed config and run nothing
  -h, --help        print this text

Exit codes: 0 ok, 2 a request that can't be served, 143 ended by SIGTERM, 1 anything else.

Keys, with their defaults (conf/config.yaml), then the choices of each group (conf/<group>/):
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code. Under srun or torchrun, rank 0 runs it, the others are its ranks."""
    from sp_bench.cli.drive import drive

    return drive(lambda: answer(sys.argv[1:] if argv is None else argv))


def answer(arguments: list[str]) -> int:
    """Run the command line in a process that drives already; return the exit code."""
    flags = {a for a in arguments if a in ("-m", "--multirun", "-h", "--help", "--cfg", "--json", "--all")}
    if flags & {"-h", "--help"}:
        print((__doc__ or "") + _keys())
        return 0
    from sp_bench.errors import RequestError

    try:
        own, overrides = _config_dir([a for a in arguments if a not in flags])
        sweep = bool(flags & {"-m", "--multirun"})
        return _run(overrides, own, flags, sweep=sweep)
    except RequestError as error:
        print(f"sp_bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sp_bench: interrupted; finished points are kept", file=sys.stderr)
        return 1


def _keys() -> str:
    from sp_bench.resources import CONF

    defaults, _, keys = (CONF / "config.yaml").read_text().partition("\n\n")
    groups = [
        f"{group.name}: {', '.join(sorted(path.stem for path in group.glob('*.yaml')))}"
        for group in sorted(CONF.iterdir())
        if list(group.glob("*.yaml")) and f"- {group.name}:" in defaults
    ]
    return "\n".join(("", keys.strip(), "", *groups))


def _config_dir(arguments: list[str]) -> tuple[Path | None, list[str]]:
    from sp_bench.cli.arguments import config_dir
    from sp_bench.errors import RequestError

    own, rest = config_dir(arguments)
    for argument in rest:
        if argument.startswith("-"):
            raise RequestError(
                argument, "there is no such flag", "known: -m, --config-dir DIR, --all, --json, --cfg, --help"
            )
        if argument.partition("=")[0].partition(".")[0] in ("sweep", "slurm"):
            raise RequestError(argument, "is for job arrays", f"python -m slurm.sweep {argument} would work")
    return own, rest


def _run(overrides: list[str], own: Path | None, flags: set[str], *, sweep: bool) -> int:
    from sp_bench.cli.compose import Composer

    with Composer(own) as composer:
        configs = [composer.compose(point) for point in composer.points(overrides, sweep=sweep)]
        if "--cfg" in flags:
            import yaml

            print("---\n".join(yaml.safe_dump(config, sort_keys=False) for config in configs), end="")
            return 0
        baseline = None if sweep else composer.baseline(configs[0], overrides)
    from sp_bench.cli.arguments import in_group, sweep_name, writable_folder
    from sp_bench.loggers import open_logger

    if sweep:
        configs = [in_group(config, sweep_name(overrides)) for config in configs]
    folder = writable_folder("results_dir", configs[0]["results_dir"])
    # The logger starts before the suite's own imports, and gets ready meanwhile.
    with open_logger({"dir": str(folder), **configs[0]["logger"]}) as logger:
        from sp_bench.cli.session import run_point, run_sweep

        shown = {"as_json": "--json" in flags, "every": "--all" in flags}
        if sweep:
            code = run_sweep(configs, folder, logger, **shown)
        else:
            code = run_point(configs[0], baseline, folder, logger, **shown)
        if warning := logger.close():
            print(f"sp_bench: {warning}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
