"""Run a command in the process that answers: the only one or, in a launch of srun or torchrun, rank 0's."""

from __future__ import annotations

from collections.abc import Callable

from sp_bench.launch import launched
from sp_bench.terminal import say
from sp_bench.termination import Terminated, terminable


def drive(answer: Callable[[], int]) -> int:
    """Call answer(), in a launch only on rank 0's process; the others are agents. All return its exit code.

    SIGTERM, which SLURM sends before it kills, ends ranks, logger and launch in order, with exit code 143.
    """
    launch = launched()
    if launch is None:
        return _in_order(answer)
    from sp_bench.measure.agents import agents_of_launch, run_agent

    if launch.rank:
        return run_agent(launch)
    return _in_order(answer, at_the_end=lambda code: agents_of_launch().dismiss(code))


def _in_order(answer: Callable[[], int], at_the_end: Callable[[int], object] = lambda code: None) -> int:
    """The exit code of answer(). `at_the_end` is called with it while SIGTERM still waits for the block to end."""
    code = 1
    with terminable():
        try:
            code = answer()
        except Terminated as terminated:
            code = 128 + terminated.signal
            say(f"sp_bench: ended by {terminated.signal.name}; finished points are kept")
        finally:
            at_the_end(code)
    return code
