"""Transports that can be asked for: where each works, what is refused, and what a record says."""

from __future__ import annotations

import pytest

from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.lower import DEFAULT_TRANSPORT, GLOO, SHARED, SYMMETRIC
from sp_bench.point.transport import KEYS
from tests.support.points import point

LOCAL = ("method=ring", "cluster=local", "gpus=4", "seqlen=1k", "dtype=float32")
H100 = ("method=ring", "gpus=8", "seqlen=64k")


def test_shared_memory_is_of_cpus() -> None:
    asked, usual = point(*LOCAL, "transport=shared_memory"), point(*LOCAL)
    assert (asked.cluster.transport, usual.cluster.transport) == (SHARED, GLOO)
    assert (asked.setup().transport, usual.setup().transport) == ("shared_memory", "gloo")
    assert asked.run_id != usual.run_id


@pytest.mark.parametrize("method", ["all_gather", "ulysses", "usp", "startrail"])
def test_collectives_are_messages_on_gloo_and_the_librarys_on_nccl(method: str) -> None:
    """Unless asked for otherwise."""
    for keys, taken in ((LOCAL, "messages"), ((*LOCAL, "transport=shared_memory"), "messages"), (H100, "auto")):
        found = [point(*keys, f"method={method}", *asked).method for asked in ((), ("method.collectives=library",))]
        assert [vars(each)["collectives"] for each in found] == [taken, "library"]


def test_what_a_simulation_does_not_know_is_said() -> None:
    """The times stay those of the cluster file."""
    asked = point(*H100, "mode=simulate", "transport=symmetric_memory", "cuda_graph=true")
    assert asked.cluster.transport is SYMMETRIC
    assert asked.setup().transport == "symmetric_memory, CUDA graph"
    assert [note.split()[0] for note in asked.notes] == ["copy", "cuda_graph"]
    zero = point(*H100, "mode=simulate", "transport=nccl", "registered_buffers=true", "cta_policy=zero")
    assert zero.setup().transport == "nccl, registered buffers, cta_policy=zero"
    assert len(zero.notes) == 2
    assert not point(*H100, "mode=simulate").notes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*LOCAL, "transport=nccl"), "transport=nccl: is between GPUs.*transport=gloo or"),
        ((*LOCAL, "transport=symmetric_memory"), "transport=symmetric_memory: is between GPUs"),
        ((*LOCAL, "cuda_graph=true"), "cuda_graph=true: only work on GPUs"),
        ((*LOCAL, "registered_buffers=true"), "registered_buffers=true: is an option of NCCL"),
        ((*LOCAL, "cta_policy=zero"), "cta_policy=zero: is an option of NCCL"),
        ((*LOCAL, "transport=rdma"), "transport"),
        ((*LOCAL, "mode=simulate", "transport=shared_memory"), "no figures for it.*mode=measure"),
        ((*H100, "transport=gloo"), "transport=gloo: is between CPUs.*transport=nccl or"),
        ((*H100, "cta_policy=zero"), "only between registered buffers; cta_policy=zero registered_buffers=true"),
        ((*H100, "transport=symmetric_memory", "registered_buffers=true"), "registered_buffers=true: is an option of"),
        ((*H100, "model=llama3_8b", "cuda_graph=true"), "a step of workload=train waits for the host"),
        ((*H100, "mode=alone", "device=cpu", "cuda_graph=true"), "cuda_graph=true: only work on GPUs"),
        ((*H100, "mode=alone", "device=cpu", "transport=nccl"), "mode=alone transfers nothing"),
        (("method=ring", "cluster=shaped", "gpus=4", "seqlen=1k", "transport=shared_memory"), "would share its memory"),
    ],
)
def test_what_cannot_carry_a_point_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        point(*overrides)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (LOCAL, "only work on GPUs can be captured"),
        ((*H100, "mode=alone", "device=cpu"), "only work on GPUs can be captured"),
        ((*H100, "mode=simulate", "model=llama3_8b"), "a step of workload=train waits for the host"),
    ],
)
def test_where_nothing_can_be_captured_auto_says_so(overrides: tuple[str, ...], why: str) -> None:
    asked = point(*overrides, "cuda_graph=auto")
    assert asked.cluster.transport_options == DEFAULT_TRANSPORT
    assert any(note.startswith(f"cuda_graph=auto: nothing is replayed, as {why}") for note in asked.notes)


def test_auto_is_a_graph_where_one_may_be() -> None:
    assert point(*H100, "mode=simulate", "cuda_graph=auto").setup().transport == "nccl, CUDA graph where it can be"


def test_a_peer_has_its_own() -> None:
    with pytest.raises(RequestError, match="transport=gloo: a peer's code has transfers of its own; transport left"):
        point(*LOCAL, "method=peer", "impl=torch_context_parallel", "transport=gloo")


def test_the_keys_are_in_the_config() -> None:
    with Composer() as composer:
        config = composer.compose(LOCAL)
    assert [config[key] for key in KEYS] == ["auto", False, None, False]
