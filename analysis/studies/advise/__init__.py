"""Answers of sp_bench.advise to ten questions. An answer that is in the folder of records is not asked for again."""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path
from typing import NamedTuple

from sp_bench.advise.__main__ import main as advise
from sp_bench.analysis.runs import Runs


class Question(NamedTuple):
    """A question in words, and as arguments of `python -m sp_bench.advise`."""

    words: str
    arguments: str


QUESTIONS = (
    Question("Llama 3 8B, 128k tokens, one node of A100", "gpus=8 seqlen=128k model=llama3_8b cluster=a100_hdr200"),
    Question("The same on eight L20, which have PCIe only", "gpus=8 seqlen=128k model=llama3_8b cluster=l20_pcie"),
    Question("Llama 3 8B, 256k tokens, two nodes of H100", "gpus=16 seqlen=256k model=llama3_8b cluster=h100_ndr400"),
    Question(
        "1M tokens on 64 H100, with 40 GB a GPU for one attention",
        "gpus=64 seqlen=1M model=llama3_8b cluster=h100_ndr400 memory=40GB plots=docs/results/advise.svg",
    ),
    Question(
        "Four nodes whose network cards carry 25 GB/s a GPU",
        "gpus=32 seqlen=512k model=llama3_8b cluster=h100_ndr400 cluster.inter.bytes_per_s=25e9",
    ),
    Question("One key head (MQA) on one node", "gpus=8 seqlen=256k heads=32 kv_heads=1 cluster=h100_ndr400"),
    Question(
        "Attention of a diffusion transformer: full mask, forward only",
        "gpus=8 seqlen=64k heads=24 head_dim=128 mask=full phase=forward cluster=h100_ndr400",
    ),
    Question("As many key heads as heads on two nodes of A800", "gpus=16 seqlen=128k model=llama_7b cluster=a800"),
    Question("20 heads, which 8 GPUs don't divide", "gpus=8 seqlen=128k heads=20 kv_heads=20 cluster=h100_ndr400"),
    Question("Inference on eight RTX 4090", "gpus=8 seqlen=64k model=llama3_8b phase=forward cluster=rtx4090_pcie"),
)


def answered(question: Question, folder: Path) -> str:
    """The output of advise, from the folder or asked for. Raises RuntimeError where it is refused."""
    file = folder / f"{hashlib.sha256(question.arguments.encode()).hexdigest()[:16]}.txt"
    if not file.exists():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = advise(question.arguments.split())
        if code:
            raise RuntimeError(f"{question.arguments}: exit {code}")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(printed.getvalue())
    return "\n".join(line.rstrip() for line in file.read_text().splitlines())


def answers(runs: Runs) -> str:
    """All questions, each with its command and what that prints."""
    parts = []
    for number, question in enumerate(QUESTIONS, start=1):
        command = f"$ python -m sp_bench.advise {question.arguments}"
        text = answered(question, runs.folder)
        parts += [f"## {number}. {question.words}", f"```text\n{command}\n{text}\n```"]
        if "plots=" in question.arguments:
            parts.append("![Time, memory, and volume against the bound, of each method](advise.svg)")
    return "\n\n".join(parts)
