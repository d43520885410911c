"""A SLURM on this machine, with nodes of 8 pretend GPUs and all state in one folder.

    python -m tests.slurm.testcluster up
    export SLURM_CONF=/tmp/sp_bench-slurm/slurm.conf
    srun -N 2 --ntasks-per-node 4 hostname
    python -m tests.slurm.testcluster down

It needs root, for munge, slurmd and device files, and the Debian packages slurm-wlm and munge. It uses free ports, so
several can run in different folders.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sp_bench.errors import RequestError
from sp_bench.terminal import say
from tests.support.processes import wait_for

FOLDER = Path("/tmp/sp_bench-slurm")
PACKAGES = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
"""The Debian package of each program that is needed."""
PORTS = range(20_000, 32_000)
"""Ports below those that systems give to outgoing connections, so that a restarted daemon gets its own again."""
_wait_for = partial(wait_for, patience_s=60.0, every_s=0.1)
LOOPBACK = "127.0.0.1"
SLURM_CONF = Path(__file__).with_name("testcluster.conf")
"""The template of slurm.conf."""
NODE = "NodeName={name} NodeHostName={controller} NodeAddr={address} Port={port} CPUs=16 RealMemory=20000 Gres=gpu:{n}"


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host of a node's slurmd: this machine, or one of its network namespaces, with its own address."""

    name: str
    address: str = LOOPBACK
    enter: tuple[str, ...] = ()
    """The prefix of a command that runs there, such as ip netns exec NAME."""


class SlurmBox:
    """A SLURM with its state in one folder. Nothing runs before `up`, nothing is left after `down`."""

    def __init__(
        self,
        folder: Path = FOLDER,
        *,
        hosts: Sequence[Host] = tuple(Host(name=f"n{i}") for i in range(1, 5)),
        gpus_per_node: int = 8,
        controller_address: str = LOOPBACK,
    ) -> None:
        """`controller_address` is the address by which all hosts reach this machine."""
        self.folder, self.hosts, self.gpus_per_node = folder.resolve(), hosts, gpus_per_node
        self.controller_address = controller_address
        self.conf = self.folder / "slurm.conf"

    def up(self) -> None:
        """Start SLURM, unless it runs, and wait until all nodes are idle. Raises RequestError if that fails."""
        refuse_without_root_and_packages()
        if self.is_up():
            return
        self.down()
        try:
            self._write()
            self._start()
            _wait_for(lambda: set(self.nodes().values()) == {"idle"}, "its nodes to be idle")
        except (OSError, subprocess.CalledProcessError, TimeoutError) as error:
            logs = "\n".join(_last_lines(path) for path in sorted(self.folder.glob("*.log")))
            self.down()
            raise RequestError(f"folder={self.folder}", f"{_reason(error)}\n{logs}", "see its logs above") from None

    def down(self) -> None:
        """End the jobs, the daemons and the processes they started, and remove the folder."""
        if self._pids("slurmctld"):
            with contextlib.suppress(subprocess.CalledProcessError, TimeoutError):
                self.run("scancel", "--user", str(os.geteuid()))
                _wait_for(lambda: not self.run("squeue", "--noheader"), "its jobs to end", patience_s=20)
        for name in ("slurmd", "slurmstepd", "slurmctld", "munged"):
            _end(self._pids(name))
        shutil.rmtree(self.folder, ignore_errors=True)

    def restart_controller(self) -> None:
        """End slurmctld, and start it from its saved state."""
        _end(self._pids("slurmctld"))
        self._daemon("slurmctld", "-f", str(self.conf))
        _wait_for(lambda: self.is_up() and "unknown" not in self.nodes().values(), "its controller to know its nodes")

    def start_soon(self, job: str) -> None:
        """Let a job that was requeued begin, which else waits for two minutes.

        A node refuses a job within the second in which it was killed there, by its credential, and the job fails.
        """
        self.run("scontrol", "update", f"jobid={job}", "starttime=now+3")

    def is_up(self) -> bool:
        """Whether the controller answers and knows all its nodes."""
        return self.conf.exists() and bool(self._pids("slurmctld")) and len(self.nodes()) == len(self.hosts)

    def nodes(self) -> dict[str, str]:
        """The state of each node, by sinfo; empty if the controller does not answer."""
        try:
            lines = self.run("sinfo", "--noheader", "--Node", "--format", "%N %T").splitlines()
        except (OSError, subprocess.CalledProcessError):
            return {}
        return {name: state.rstrip("*") if self._pids("slurmd") else "down" for name, state in map(str.split, lines)}

    def environment(self) -> dict[str, str]:
        """The environment in which SLURM's commands use this cluster."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return inherited | {"SLURM_CONF": str(self.conf)}

    def run(self, *command: str) -> str:
        """The output of one of SLURM's commands. Raises CalledProcessError if it fails."""
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    def _write(self) -> None:
        """Make the folder, with the settings, munge's key and the files of the pretend GPUs."""
        controller, (controller_port, *ports) = platform.node(), _free_ports(1 + len(self.hosts))
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        nodes = [
            NODE.format(name=host.name, controller=controller, address=host.address, port=port, n=self.gpus_per_node)
            for host, port in zip(self.hosts, ports, strict=True)
        ]
        names = ",".join(host.name for host in self.hosts)
        self.conf.write_text(
            SLURM_CONF.read_text().format(
                controller=controller,
                controller_address=self.controller_address,
                controller_port=controller_port,
                folder=self.folder,
                nodes="\n".join(nodes),
                names=names,
            )
        )
        for gpu in range(self.gpus_per_node):
            os.mknod(self.folder / f"gpu{gpu}", 0o666 | 0o020000, os.makedev(1, 3))
        files = f"{self.folder}/gpu[0-{self.gpus_per_node - 1}]"
        (self.folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File={files}\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _start(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        self._daemon("munged", "--force", *(f"--{option}={self.folder / name}" for option, name in files.items()))
        self._daemon("slurmctld", "-f", str(self.conf))
        for host in self.hosts:
            self._daemon(*host.enter, "slurmd", "-f", str(self.conf), "-N", host.name)

    def _daemon(self, *command: str) -> None:
        """Start a daemon, which detaches itself."""
        subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=True, timeout=60)

    def _pids(self, name: str) -> list[int]:
        """The daemons of this cluster with a name: its folder is in their arguments or environment."""
        return [pid for pid in _processes(name) if str(self.folder).encode() in _arguments_and_environment(pid)]


def refuse_without_root_and_packages() -> None:
    """Raise RequestError if this user or machine can't start a cluster."""
    missing = sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=_path())})
    if missing:
        would_work = f"apt-get install -y {' '.join(missing)} would work"
        raise RequestError("a SLURM on this machine", f"needs the packages {' and '.join(missing)}", would_work)
    if os.geteuid() != 0:
        would_work = "sudo python -m tests.slurm.testcluster up would work"
        raise RequestError("a SLURM on this machine", "needs root, as its daemons do", would_work)


def _path() -> str:
    """PATH with the folders of daemons, which a user's may lack."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    ports: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def _processes(name: str) -> list[int]:
    """The ids of all processes of a program, without zombies."""
    pids = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            command, _, rest = status.read_text().partition("(")[2].rpartition(")")
            if command == name and rest.split()[0] != "Z":
                pids.append(int(status.parent.name))
    return pids


def _arguments_and_environment(pid: int) -> bytes:
    """The arguments and the environment that a process was started with; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _descendants(pids: Iterable[int]) -> list[int]:
    """The ids of all descendants of some processes."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    descendants, below = [], list(pids)
    while below:
        below = [child for pid in below for child in children.get(pid, [])]
        descendants += below
    return descendants


def _end(pids: list[int]) -> None:
    """Send SIGTERM to processes and, after a while, SIGKILL to them and their descendants."""
    below = _descendants(pids)
    _signal(pids, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        _wait_for(lambda: not any(_arguments_and_environment(pid) for pid in pids), "processes to end", patience_s=10)
    _signal([*pids, *below], signal.SIGKILL)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reason(error: Exception) -> str:
    return f"{error.cmd[0]}: {error.stderr.strip()}" if isinstance(error, subprocess.CalledProcessError) else str(error)


def _last_lines(path: Path, count: int = 5) -> str:
    return "\n".join(f"{path.name}: {line}" for line in path.read_text(errors="replace").splitlines()[-count:])


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.slurm.testcluster", description="A real SLURM on this machine."
    )
    parser.add_argument("command", choices=("up", "down", "status"))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where all its state is (default: %(default)s)")
    arguments = parser.parse_args(argv)
    os.environ["PATH"] = _path()
    box = SlurmBox(arguments.folder)
    try:
        if arguments.command == "up":
            box.up()
        elif arguments.command == "down":
            box.down()
    except RequestError as error:
        say(f"testcluster: {error}")
        return 2
    nodes = box.nodes() if box.conf.exists() else {}
    print("\n".join(f"{name}  {state}" for name, state in nodes.items()) or f"no cluster in {box.folder}")
    if nodes:
        print(f"export SLURM_CONF={box.conf}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
