"""`sp-bench` and python -m sp_bench: a point, a sweep, or one of the commands (sp_bench.cli.commands)."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from sp_bench.collection import importing
from sp_bench.terminal import fitted, say

COMMAND = ("run", "[-m] key=value ...", "a point beside a baseline; with -m each combination of values")

FLAGS = ("-m", "--multirun", "--all", "--json", "--cfg", "-h", "--help")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code. Under srun or torchrun, rank 0 runs it, the others are its ranks."""
    from sp_bench.cli.commands import COMMANDS

    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name == "help":
        return _help(arguments[1:])
    if name in COMMANDS and name != "run":
        return COMMANDS[name].run(arguments[1:])
    from sp_bench.cli.drive import drive

    return drive(lambda: answer(arguments[name == "run" :]))


def answer(arguments: list[str]) -> int:
    """Run points in a process that drives already; return the exit code."""
    flags = {a for a in arguments if a in FLAGS}
    if flags & {"-h", "--help"}:
        from sp_bench.cli.help import overview

        print(overview())
        return 0
    from sp_bench.errors import RequestError

    try:
        own, overrides = _config_dir([a for a in arguments if a not in flags])
        sweep = bool(flags & {"-m", "--multirun"})
        return _run(overrides, own, flags, sweep=sweep)
    except RequestError as error:
        say(f"sp_bench: {error}")
        return 2
    except KeyboardInterrupt:
        say("sp_bench: interrupted; finished points are kept")
        return 1


def _help(words: list[str]) -> int:
    """Print what is known of keys, groups and commands, or all keys; return the exit code."""
    from sp_bench.cli.commands import COMMANDS
    from sp_bench.cli.help import all_keys, explained
    from sp_bench.errors import RequestError

    if words and words[0] in COMMANDS:
        return main([words[0], "--help"])
    try:
        print(fitted("\n\n".join(map(explained, words)) or all_keys()))
    except RequestError as error:
        say(f"sp_bench: {error}")
        return 2
    return 0


def _config_dir(arguments: list[str]) -> tuple[Path | None, list[str]]:
    from sp_bench.cli.arguments import config_dir, refuse_flags
    from sp_bench.cli.commands import COMMANDS
    from sp_bench.errors import RequestError, unknown

    own, rest = config_dir(arguments)
    refuse_flags(rest, ["--config-dir", *FLAGS])
    for argument in rest:
        if argument.partition("=")[0].partition(".")[0] in ("sweep", "slurm"):
            raise RequestError(argument, "is for job arrays", f"sp-bench sweep {argument} would work")
    if rest and difflib.get_close_matches(rest[0], COMMANDS, n=1, cutoff=0.7):
        raise unknown("command", rest[0], COMMANDS)
    return own, rest


def _run(overrides: list[str], own: Path | None, flags: set[str], *, sweep: bool) -> int:
    with importing():
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
        with importing():
            from sp_bench.cli.session import run_point, run_sweep

        shown = {"as_json": "--json" in flags, "every": "--all" in flags}
        if sweep:
            code = run_sweep(configs, folder, logger, **shown)
        else:
            code = run_point(configs[0], baseline, folder, logger, **shown)
        if warning := logger.close():
            say(f"sp_bench: {warning}")
    return code


if __name__ == "__main__":
    sys.exit(main())
