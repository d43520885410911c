"""Synthetic data with structure, made by a seed: the same whole batch on every rank, which takes its own tokens."""

from __future__ import annotations

import torch
from torch import Tensor

PERIODS = 8


def tokens(task: str, vocab: int, batch: int, seqlen: int, generator: torch.Generator) -> Tensor:
    """Token ids (B, S), int64.

    copy: S / 8 random tokens again and again, so that a token can be known by attending S / 8 tokens back.
    recall: key and value in turn; each sequence has one random value for each of its keys (associative recall, Ba et
    al. 2016), so that a value can be known where its key has come before.
    """
    if task == "copy":
        period = max(seqlen // PERIODS, 1)
        first = torch.randint(vocab, (batch, period), generator=generator)
        return first.repeat(1, -(-seqlen // period))[:, :seqlen]
    keys = max(vocab // 4, 1)
    values = torch.randint(keys, vocab, (batch, keys), generator=generator)
    drawn = torch.randint(keys, (batch, -(-seqlen // 2)), generator=generator)
    return torch.stack((drawn, values.gather(1, drawn)), dim=-1).flatten(1)[:, :seqlen]


def noisy(channels: int, batch: int, seqlen: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy patches (B, S, C), the noise in them, and the diffusion time of each sequence in 0 .. 1, (B,); fp64.

    Clean patches are a few waves over the sequence, so that a patch says something about the others.
    """
    at = torch.arange(seqlen, dtype=torch.float64)[None, :, None]
    waves = 1 + 7 * torch.rand((batch, 1, channels), generator=generator, dtype=torch.float64)
    clean = (2 * torch.pi * waves * at / seqlen).sin()
    noise = torch.randn((batch, seqlen, channels), generator=generator, dtype=torch.float64)
    times = torch.rand((batch,), generator=generator, dtype=torch.float64)
    alpha = (times * torch.pi / 2).cos()[:, None, None]  # cosine schedule, Nichol and Dhariwal 2021
    return alpha * clean + (1 - alpha**2).sqrt() * noise, noise, times
