"""Embedding rows stored in 2 bytes a number: ``model.embedding_precision: bf16`` or ``fp16``.

Rows are widened to float32 where they are looked up and updated, so sums, gradients and
optimiser state are float32 throughout. What an update computes is rounded stochastically:
a value between two neighbouring numbers of the format becomes the upper one with the
probability of its place between them, so that its expected value is kept. (Rounded to the
nearest, a weight stands still once its change is below half the distance between the two;
Gupta et al. 2015, arXiv:1502.02551.)

The random numbers are a function of what is rounded and of nothing else: Philox4x32 with
7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", whose table 2
lists it as passing BigCrush), key ``(training.seed, 0)``, counter (block of columns, group
of rows, table, update). So a run can be repeated bit for bit with any number of threads,
and continued from a checkpoint. Within a group, its member m adds m times 2^32 divided by
the golden ratio, modulo 2^32: each word is as uniform as Philox's, words of two updates are
independent, and a block of words serves many rows. :func:`words` is the law that the
kernels of the CPU and the GPU follow.

Shapes: n rows, d columns.
"""

from __future__ import annotations

import torch

GROUP_BITS = 8
"""Rows ``r`` with the same ``r >> 8`` are a group, of which ``r & 255`` is the member."""

PHILOX_ROUNDS = 7
GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio, rounded to odd: its multiples are spread evenly."""

LANES, WORDS = 16, 4
"""Columns 64 k + 16 w + l take word w of counter 16 k + l: a vector of 16 columns is one word."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""Philox4x32's: a round multiplies by the former, and the key grows by the latter."""

_LOW = 0xFFFFFFFF
_INFINITY = 0x7F800000


def philox(key: int, counter: list[torch.Tensor]) -> list[torch.Tensor]:
    """Four words of 32 bits for each counter of four words; all int64 of one shape."""
    a, b, c, d = counter
    keys = [key & _LOW, 0]
    for _ in range(PHILOX_ROUNDS):
        # the products of two words of 32 bits need 64 unsigned ones: the halves are taken apart
        high, low = _product(MULTIPLIERS[0], a)
        other_high, other_low = _product(MULTIPLIERS[1], c)
        a, b, c, d = other_high ^ b ^ keys[0], other_low, high ^ d ^ keys[1], low
        keys = [(word + step) & _LOW for word, step in zip(keys, WEYL, strict=True)]
    return [a, b, c, d]


def _product(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of two words of 32 bits, without passing 2^63."""
    upper, lower = (factor >> 16) * word, (factor & 0xFFFF) * word
    total = upper + (lower >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)


def words(
    seed: int, update: int, table: int, groups: torch.Tensor, members: torch.Tensor, dim: int
) -> torch.Tensor:
    """The random words (n, d) int64 of 32 bits for rows of a table in an update.

    Args:
        groups: (n,) int64, of 32 bits.
        members: (n,) int64.
    """
    found, place = torch.unique(groups, return_inverse=True)
    column = torch.arange(dim, device=groups.device)
    blocks = -(-dim // (LANES * WORDS)) * LANES
    block = torch.arange(blocks, device=groups.device).expand(len(found), blocks)
    counter = [block, found[:, None].expand_as(block)]
    counter += [torch.full_like(block, table), torch.full_like(block, update & _LOW)]
    drawn = torch.stack(philox(seed, counter), dim=-1)  # (groups, blocks, 4)
    which = column // (LANES * WORDS) * LANES + column % LANES
    base = drawn[:, which, column // LANES % WORDS]
    return (base[place] + (members * GOLDEN)[:, None]) & _LOW


def round_rows(values: torch.Tensor, drawn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 values in a format of 2 bytes, each up or down by its word of :func:`words`.

    A value that the format holds stays; a value beyond its largest becomes infinite.

    Args:
        drawn: 32 bits each, of the values' shape.
        dtype: torch.bfloat16 or torch.float16.
    """
    bits = values.contiguous().view(torch.int32).long()
    size = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        kept = (size + (drawn >> 16)) >> 16
        kept = torch.where(size > _INFINITY, 0x7FC0, kept)
    else:
        kept = _half_bits(size, drawn)
    kept = kept | ((bits >> 16) & 0x8000)
    return kept.to(torch.int32).to(torch.int16).view(dtype)


def _half_bits(size: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Bits of fp16 for the bits of a float32 without its sign.

    13 bits are dropped of a normal number, one more for each power of two below 2^-14.
    """
    exponent = size >> 23
    dropped = (126 - exponent).clamp(min=13)
    small = ((size & 0x7FFFFF) | 0x800000) >> (dropped - 31).clamp(min=0, max=31)
    mantissa = torch.where(exponent < 113, small, size - (112 << 23))
    dropped = dropped.clamp(max=31)
    kept = ((mantissa + (drawn >> (32 - dropped))) >> dropped).clamp(max=0x7C00)
    return torch.where(size > _INFINITY, 0x7E00, kept)
