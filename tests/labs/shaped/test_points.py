"""Whole points on cluster=shaped: measured on hosts, simulated anywhere, refused where hosts can't be made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.__main__ import main
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.launch import Launch
from sp_bench.point import resolve
from tests.support.hosts import BURST_BYTES
from tests.support.typed import Known

ROOT = Path(__file__).parents[3]
LINK_BYTES_PER_S = 5e6
POINT = (
    "cluster=shaped method=ring gpus=4 seqlen=1k heads=4 head_dim=64 dtype=float32 phase=forward logger=none".split()
)
POINT += [f"cluster.hosts.link_bytes_per_s={LINK_BYTES_PER_S}", f"cluster.hosts.burst_bytes={BURST_BYTES}"]
WITHOUT_RIGHTS = ["setpriv", "--bounding-set", "-sys_admin,-net_admin"]


def command_line(
    arguments: Sequence[str], folder: Path, *, before: tuple[str, ...] = (), path: str | None = None
) -> str:
    """The error of a refused point, after exit code 2 and without a record."""
    command = [*before, sys.executable, "-m", "sp_bench", *arguments, f"results_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": path} if path else None)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not list(folder.glob("*.json"))
    return done.stderr


@pytest.mark.usefixtures("can_be_made")
@pytest.mark.long
def test_a_point_is_measured_on_hosts(tmp_path: Path) -> None:
    """No link can have carried what each rank sent in less than this."""
    assert main([*POINT, "iters=3", "warmup=1", f"results_dir={tmp_path}"]) == 0
    (path,) = (path for path in tmp_path.glob("*.json") if "." not in path.stem)
    record = records.read(path)
    assert (record.status, record.mode, record.nodes) == ("ok", "measure", 4)
    assert Known(record).provenance["ranks_by_host"] == {f"host{rank}": [rank] for rank in range(4)}
    assert record.comm_bytes_per_gpu and record.comm_bytes_per_gpu == record.comm_bytes_expected
    assert record.step_ms_median
    assert record.step_ms_median / 1e3 >= (record.comm_bytes_per_gpu - BURST_BYTES) / LINK_BYTES_PER_S


def test_it_is_simulated_without_any_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*POINT, "mode=simulate", f"results_dir={tmp_path}"]) == 0
    (path,) = (path for path in tmp_path.glob("*.json") if "." not in path.stem)
    record = records.read(path)
    assert (record.status, record.mode, record.nodes) == ("ok", "simulate", 4)


def test_ranks_that_run_already_get_no_hosts() -> None:
    with Composer() as composer, pytest.raises(RequestError, match="cluster=shaped: its hosts are made for ranks that"):
        resolve(composer.compose(POINT), Launch.planned(4))


@pytest.mark.parametrize(("there", "missing"), [([], "ip"), (["ip"], "tc"), (["ip", "tc"], "bridge")])
def test_a_missing_tool_is_named(there: list[str], missing: str, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in there:
        if not (tool := shutil.which(name)):
            pytest.skip(f"{name} is not in PATH")
        (tools / name).symlink_to(tool)
    said = " ".join(command_line(POINT, tmp_path, path=str(tools)).split())
    assert f"cluster.hosts: hosts are made with {missing}, which is not in PATH; the package iproute2" in said


def test_missing_rights_are_named(tmp_path: Path) -> None:
    if not shutil.which("setpriv"):
        pytest.skip("setpriv is not in PATH")
    said = command_line(POINT, tmp_path, before=tuple(WITHOUT_RIGHTS))
    assert "cluster.hosts: hosts can't be made with this user's rights (unshare: Operation not permitted); root" in said


@pytest.mark.usefixtures("can_be_made")
def test_a_user_namespace_gives_the_rights() -> None:
    """As the refusal says: who is no root needs none of root's rights."""
    inside = [*WITHOUT_RIGHTS, "unshare", "--map-root-user"]
    if not shutil.which("setpriv") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no user namespaces for users without rights")
    code = "from sp_bench.labs.shaped.hosts import ShapedHosts; from tests.support.hosts import described; "
    code += "ShapedHosts(described(), (0, 1)).close(); print('made')"
    done = subprocess.run([*inside, sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "made\n", done.stderr
