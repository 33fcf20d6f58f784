"""What ``dlrm bench --embeddings`` measures: Kalamkar's Small tables, and the contention study.

Kalamkar et al. 2020 (arXiv:2005.04680): Small has 8 tables of 1,000,000 rows of 64 floats,
minibatch 2048, 50 lookups a bag; section III compares updates under the uniform indices of
random data and under the skewed ones of Criteo's Terabyte set, where threads fight for rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_core.errors import InputError

TABLES, ROWS, DIM = 8, 1_000_000, 64
"""Kalamkar's Small. The bench's row kernel is written for this width."""

SKEW = 1.45
"""Exponent of the power law that NVIDIA's synthetic Terabyte-like data follows."""

FACEBOOK, TORCH, FBGEMM, FUSED, MEMORY = "facebook", "torch", "fbgemm", "fused", "memory"
BACK_ENDS = (FACEBOOK, TORCH, FBGEMM, FUSED, MEMORY)
UPDATES = ("naive", "atomic", "locked", "race_free")


@dataclass(frozen=True)
class EmbeddingCase:
    """Forward, backward and update of all tables under one law of indices.

    Attributes:
        pooling: lookups of every bag.
        skew: exponent of the power law of rows, row 0 hottest; None: uniform.
        contestants: back ends, or updates of ``fused``.
        targets: contestant against whom to how many times as fast ``fused`` is to be.
    """

    name: str
    optimizer: str
    pooling: int
    batch: int = 2048
    skew: float | None = None
    contestants: tuple[str, ...] = BACK_ENDS
    targets: tuple[tuple[str, float], ...] = ()

    @property
    def meaning(self) -> str:
        """One line for readers."""
        law = "uniform rows" if self.skew is None else f"rows by a power law ({self.skew})"
        lookups = f"{self.pooling} lookup{'s' if self.pooling > 1 else ''} a bag"
        return f"{self.optimizer}, batch {self.batch}, {lookups}, {law}"


_SGD = ((FACEBOOK, 5.0), (FBGEMM, 2.7))

GROUPS: dict[str, tuple[EmbeddingCase, ...]] = {
    "sgd": (
        EmbeddingCase("sgd-50", "sgd", 50, targets=_SGD),
        EmbeddingCase("sgd-1", "sgd", 1),
        EmbeddingCase("sgd-100", "sgd", 100),
        EmbeddingCase("sgd-50-skewed", "sgd", 50, skew=SKEW),
    ),
    "rowwise": (
        EmbeddingCase("rowwise-50", "rowwise_adagrad", 50, targets=((FACEBOOK, 6.0),)),
        EmbeddingCase("rowwise-1", "rowwise_adagrad", 1),
        EmbeddingCase("rowwise-50-skewed", "rowwise_adagrad", 50, skew=SKEW),
    ),
    "adagrad": (EmbeddingCase("adagrad-50", "adagrad", 50),),
    "contention": (
        EmbeddingCase("contention-uniform", "sgd", 1, 16384, contestants=UPDATES),
        EmbeddingCase("contention-skewed", "sgd", 1, 16384, SKEW, UPDATES),
        EmbeddingCase("contention-50-uniform", "sgd", 50, contestants=UPDATES),
        EmbeddingCase("contention-50-skewed", "sgd", 50, skew=SKEW, contestants=UPDATES),
    ),
}
"""Cases that share a process of each contestant."""


def groups_of(names: str) -> dict[str, tuple[EmbeddingCase, ...]]:
    """Groups by their names, comma-separated; ``all`` for every one.

    Raises:
        InputError: a name is unknown.
    """
    if names == "all":
        return GROUPS
    chosen = {}
    for name in (part.strip() for part in names.split(",")):
        if name not in GROUPS:
            raise InputError(f"--embeddings is '{name}', expected all or {', '.join(GROUPS)}")
        chosen[name] = GROUPS[name]
    return chosen
