"""StarTrail: teams of C ranks share their Q, and KV goes round C^2 small rings instead of a large one.

Source: Liu et al., "StarTrail: Concentric Ring Sequence Parallelism for Efficient Near-Infinite-Context Transformer
Model Training", 2025; the four stages as in Mesh-Attention, section 3.8. A team is C consecutive ranks, a block C
consecutive teams.
    1. All-gather: every rank of a team gets the team's Q and KV chunks.
    2. Initialisation: rank c of team s in a block gets the KV of team c from that team's rank s. If c = s, it has it.
    3. Sub-rings: these C chunks go round the n / C^2 ranks with the same position in every block. Each rank of a team
       sees one C-th of KV, the team all of it.
    4. Reduce-scatter: the team's partial outputs are summed at their owners.
Stages 1 and 4 are the library's collectives; with `collectives=messages` they are hops of a ring.
Backward: OdOQ and KV take the same stages. dKV follows KV along the sub-rings, returns to its team and is summed there.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads, lse apart:
    forward   (1 + 2k) (C - 1) + 2k (C - 1) + 2k (n / C - C) + (C - 1), by stage
    backward  (3 + 2k) (C - 1) + 2k (C - 1) + 4k (n / C - C) + 2k (C - 1) + (1 + 2k) (C - 1)
This is the mean over ranks. A rank that sends in stage 2 sends 2k C there; with k = 1 its forward total is
4 C - 4 + 2 n / C, which is table 2 of the Mesh paper, (4 C - 4) / n + 2 / C in units of N * d. That paper's text sums
the same four stages to (4 C - 1) / n + 2 / C, which is 3 / n too much.

Layouts: striped, zigzag, contiguous. Masks: full, causal. Refuses C whose square doesn't divide n. C = 1 is Ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from sp_bench.plan import (
    DKV,
    DOWN,
    DQ,
    KV,
    ODOQ,
    Attend,
    AttendBackward,
    Chunk,
    CollectiveMethod,
    CostProfile,
    Exchange,
    Fold,
    Grid,
    Group,
    Line,
    O,
    Pass,
    Plan,
    Problem,
    Q,
    Sized,
    Steps,
    Tensor,
    all_gather,
    divisors,
    receive_next,
    reduce_next,
    reduce_scatter,
)


@dataclass(frozen=True, kw_only=True)
class StarTrail(Sized, CollectiveMethod):
    """StarTrail with teams of C ranks."""

    name: ClassVar[str] = "startrail"
    colour: ClassVar[str] = "#949494"
    marker: ClassVar[str] = "*"
    citation: ClassVar[str] = "Liu et al. 2025"
    gathers: ClassVar[bool] = True
    by_blocks: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {
        "forward": "(2 + 4*k)*(C-1) + 2*k*(n/C-C)",
        "backward": "(4 + 8*k)*(C-1) + 4*k*(n/C-C)",
    }

    size_option: ClassVar[str] = "team"

    team: str | int = "auto"
    """C, the ranks of a team; auto stands for every C whose square divides n."""

    def sizes(self, problem: Problem) -> list[int]:
        """Every C whose square divides n, as blocks of C teams must be equal."""
        return [c for c in divisors(problem.n) if problem.n % c**2 == 0]

    def size_rule(self, problem: Problem) -> str:
        """The rule for `team`, in words that follow "must"."""
        return f"have a square that divides gpus={problem.n}"

    def variant(self, n: int) -> str:
        """The team size C, in words."""
        return f"C={self.size}"

    def homes(self, problem: Problem, phase: str) -> tuple[Group | Grid, Group | Grid]:
        """The team, and the ranks whose KV comes along the sub-rings."""
        return Group(1, self.size), self._in_orbit(KV, problem).home

    def partials_folded(self, problem: Problem, phase: str, tensor: Tensor) -> int:
        """dKV of each hop along the sub-rings."""
        return problem.n // self.size - self.size if tensor == DKV else 0

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The value of C."""
        return {"C": self.size}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The four stages of the header."""
        q, kv, o = (self._in_team(tensor) for tensor in (Q, KV, O))
        orbit = self._in_orbit(KV, problem)
        steps = Steps()
        self._gather(steps, problem, q, kv, orbit)
        for s in range(problem.n // self.size**2):
            self._receive(steps, orbit, s)
            for chunk in self._chunks(orbit, s):
                steps.do(*(Attend(q.at(u), chunk, o.at(u)) for u in range(self.size)))
        steps.next(*reduce_scatter(o, lane="team", library=self.by_library(problem)))
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The four stages, with dKV one hop behind KV, then back to its team."""
        odoq, kv, dq, dkv = (self._in_team(tensor) for tensor in (ODOQ, KV, DQ, DKV))
        orbit, orbit_dkv = self._in_orbit(KV, problem), self._in_orbit(DKV, problem)
        lines, size = self._lines(orbit_dkv), problem.n // self.size**2
        steps = Steps()
        self._gather(steps, problem, odoq, kv, orbit)
        for s in range(size):
            self._receive(steps, orbit, s)
            behind = [reduce_next(line, s - 2, lane="dkv") for line in lines if s >= 2]
            steps.do(*(hop for hop, _ in behind))
            for chunk, into in zip(self._chunks(orbit, s), self._chunks(orbit_dkv, s), strict=True):
                steps.do(*(AttendBackward(odoq.at(u), chunk, dq.at(u), into) for u in range(self.size)))
            steps.do(*(fold for _, fold in behind))
        steps.next()
        for line in lines if size > 1 else ():
            steps.do(*reduce_next(line, size - 2, lane="dkv"))
        steps.next(*reduce_scatter(dq, lane="team", library=self.by_library(problem)))
        for e, line in enumerate(lines):
            arriving = dkv.at(e).arriving()
            steps.do(self._swap(line.at(0), arriving, "dkv"), Fold(arriving, dkv.at(e)))
        steps.do(*reduce_scatter(dkv, lane="dkv", library=self.by_library(problem)))
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The header's formulas, by tensor."""
        team, rings = self.size - 1, self.size - 1 + problem.n // self.size - self.size
        sent = (Q, KV, O) if phase == "forward" else (ODOQ, KV, DQ, DKV)
        gathered = {tensor: team * self.padding(problem, tensor) for tensor in sent}
        return {t: count + rings * t.of_keys for t, count in gathered.items()}

    @property
    def _partners(self) -> Exchange:
        """Pairs rank c of team s with rank s of team c."""
        return Exchange(Group(1, self.size), Group(self.size, self.size))

    def _in_team(self, tensor: Tensor) -> Chunk:
        """#u belongs to the team's rank u ahead."""
        return Chunk(tensor, 0, Group(1, self.size))

    def _in_orbit(self, tensor: Tensor, problem: Problem) -> Chunk:
        """#(e + C s) belongs to the rank that is e ahead of this rank's partner in its team, s blocks behind."""
        size = self.size
        return Chunk(tensor, 0, Grid(Group(1, size), Group(size**2, problem.n // size**2, DOWN), self._partners))

    def _lines(self, orbit: Chunk) -> list[Line]:
        """A rank's sub-rings, one for each of the C chunks that move together."""
        assert isinstance(orbit.home, Grid)
        return [Line(orbit.at(e), orbit.home.outer, self.size) for e in range(self.size)]

    def _chunks(self, orbit: Chunk, s: int) -> list[Chunk]:
        return [line.at(s) for line in self._lines(orbit)]

    def _swap(self, send: Chunk, recv: Chunk, lane: str) -> Pass:
        return Pass(lane, send=send, recv=recv, group=self._partners, shift=1)

    def _gather(self, steps: Steps, problem: Problem, q: Chunk, kv: Chunk, orbit: Chunk) -> None:
        steps.next()
        library = self.by_library(problem)
        steps.do(*all_gather(q, lane="team", library=library), *all_gather(kv, lane="kv", library=library))
        steps.next(*(self._swap(kv.at(e), chunk, "kv") for e, chunk in enumerate(self._chunks(orbit, 0))))

    def _receive(self, steps: Steps, orbit: Chunk, s: int) -> None:
        steps.next(*(receive_next(line, s, lane="kv") for line in self._lines(orbit) if s + 1 < line.group.size))
