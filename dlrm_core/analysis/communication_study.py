"""The configurations of Kalamkar et al. 2020 at full size, and the table that they quote.

arXiv:2005.04680, tables I (configurations) and II (what scaling costs). The presets
``kalamkar_large`` and ``mlperf`` are scaled to fit a small machine; here they are whole, so
that what depends on sizes only (bytes, ranks, memory) can be said without the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from dlrm_core.analysis.communication import MIB, allreduce_bytes, alltoall_bytes
from dlrm_core.analysis.sharding import maximum_ranks
from dlrm_core.config import DataConfig, ModelConfig, Parameters, TrainingConfig

SOURCE = "Kalamkar et al. 2020 (arXiv:2005.04680), tables I and II"

MLPERF_ROWS = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)
"""MLPerf's tables: Criteo Terabyte with indices modulo 40,000,000 (``--max-ind-range`` of
facebookresearch/dlrm's bench/run_and_time.sh)."""


@dataclass(frozen=True)
class Study:
    """One configuration, and what the study quotes of it."""

    name: str
    preset: str
    model: ModelConfig
    lookups: int
    single_batch: int | None
    strong_batch: int
    weak_batch_per_rank: int
    quoted_ranks: int
    quoted_allreduce_mib: float
    quoted_alltoall_mib: float
    embedding_share: str
    """Of one socket's iteration, once optimised, in the study's words."""

    def parameters(self, batch_size: int | None = None) -> Parameters:
        """The configuration at full size; with the strong-scaling batch unless told."""
        return Parameters(
            title=f"Kalamkar et al. 2020: {self.name}, full size",
            model=self.model,
            data=DataConfig(
                generator="uniform", indices_per_lookup=self.lookups, fixed_pooling=True
            ),
            training=TrainingConfig(batch_size=batch_size or self.strong_batch),
        )


STUDY = (
    Study(
        "Small",
        "kalamkar_small",
        ModelConfig(
            bottom_mlp=(512, 512, 64),
            top_mlp=(1024, 1024, 1024, 1),
            embedding_dim=64,
            tables=8,
            table_rows=(1_000_000,),
        ),
        *(50, 2048, 8192, 1024),
        *(8, 9.5, 15.8, "about 30 %"),
    ),
    Study(
        "Large",
        "kalamkar_large",
        ModelConfig(
            bottom_mlp=(*(2048,) * 8, 256),
            top_mlp=(*(4096,) * 15, 1),
            embedding_dim=256,
            tables=64,
            table_rows=(6_000_000,),
        ),
        *(100, None, 16384, 512),
        *(64, 1047, 1024, "not said"),
    ),
    Study(
        "MLPerf",
        "mlperf",
        ModelConfig(
            bottom_mlp=(13, 512, 256, 128),
            top_mlp=(1024, 1024, 512, 256, 1),
            embedding_dim=128,
            tables=None,
            table_rows=MLPERF_ROWS,
        ),
        *(1, 2048, 16384, 2048),
        *(26, 9.0, 208, "under 20 %"),
    ),
)


def full_size(parameters: Parameters) -> Parameters:
    """The study's own size of a configuration that was scaled down; else as it is.

    Recognised by MLPs and width, which the scaled presets keep.
    """
    found = study_of(parameters)
    if found is None:
        return parameters
    data = replace(parameters.data, indices_per_lookup=found.lookups, fixed_pooling=True)
    return replace(parameters, model=found.model, data=data, title=f"{found.name}, full size")


def study_of(parameters: Parameters) -> Study | None:
    """The study's configuration with the same MLPs and width."""
    model = parameters.model
    for each in STUDY:
        same = (model.bottom_widths, model.top_mlp, model.embedding_dim) == (
            each.model.bottom_widths,
            each.model.top_mlp,
            each.model.embedding_dim,
        )
        if same:
            return each
    return None


def study_table() -> pd.DataFrame:
    """What scaling costs, from formulas, beside what the study quotes.

    Returns:
        ``name``, ``ranks`` (most, table-wise), ``quoted_ranks``, ``allreduce_mib``,
        ``quoted_allreduce_mib``, ``allreduce_error`` (relative), ``alltoall_mib`` (strong
        scaling), ``quoted_alltoall_mib``, ``alltoall_error``.
    """
    rows = []
    for each in STUDY:
        parameters = each.parameters()
        reduced = allreduce_bytes(parameters) / MIB
        exchanged = alltoall_bytes(parameters, each.strong_batch) / MIB
        rows.append(
            {
                "name": each.name,
                "ranks": maximum_ranks(parameters, "table_wise"),
                "quoted_ranks": each.quoted_ranks,
                "allreduce_mib": reduced,
                "quoted_allreduce_mib": each.quoted_allreduce_mib,
                "allreduce_error": reduced / each.quoted_allreduce_mib - 1,
                "alltoall_mib": exchanged,
                "quoted_alltoall_mib": each.quoted_alltoall_mib,
                "alltoall_error": exchanged / each.quoted_alltoall_mib - 1,
            }
        )
    return pd.DataFrame(rows)
