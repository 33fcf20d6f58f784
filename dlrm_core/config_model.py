"""The sections ``model`` and ``data`` of a parameters file, see :mod:`dlrm_core.config`."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_core.errors import InputError
from dlrm_core.settings import coerce_section, setting


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the DLRM: bottom MLP, embedding tables, interaction, top MLP."""

    mlp_sizes: str = setting(
        "facebook",
        "how bottom_mlp is counted: 'facebook' includes the input width "
        "(512-512-64 is 512 dense features and two layers); 'nvidia' excludes it",
        choices=("facebook", "nvidia"),
    )
    dense_features: int | None = setting(
        None,
        "number of dense (numerical) features; required with mlp_sizes: nvidia, "
        "with facebook it is bottom_mlp's first width",
        minimum=1,
    )
    bottom_mlp: tuple[int, ...] = setting(
        (512, 512, 64), "widths of the bottom MLP; the last equals embedding_dim", minimum=1
    )
    top_mlp: tuple[int, ...] = setting(
        (1024, 1024, 1024, 1),
        "widths of the top MLP without its input, which follows from the interaction",
        minimum=1,
    )
    embedding_dim: int = setting(64, "width of an embedding row", minimum=1)
    tables: int | None = setting(
        8, "number of embedding tables; left out, the length of table_rows", minimum=1
    )
    table_rows: tuple[int, ...] = setting(
        (1_000_000,), "rows of each table: one number for all, or a list", minimum=1
    )
    interaction: str = setting(
        "dot", "'dot': pairwise dot products; 'cat': concatenation", choices=("dot", "cat")
    )
    interaction_itself: bool = setting(
        False, "with dot: include each feature's product with itself"
    )
    loss: str = setting(
        "mse",
        "mean squared error (facebook's default), binary cross entropy, or weighted BCE",
        choices=("mse", "bce", "wbce"),
    )
    loss_weights: tuple[float, ...] = setting(
        (1.0, 1.0), "with wbce: weights of the targets 0 and 1", minimum=0.0
    )
    loss_threshold: float = setting(
        0.0, "clamp predictions to [t, 1-t] when 0 < t < 1", minimum=0.0, maximum=1.0
    )
    init: str = setting(
        "facebook",
        "'facebook': facebookresearch/dlrm's own numpy stream, same weights bit for bit; "
        "'torch': the same distributions drawn on the device, faster",
        choices=("facebook", "torch"),
    )

    def __post_init__(self) -> None:
        coerce_section(self, "model")
        rows = self.table_rows
        if self.tables is None:
            object.__setattr__(self, "tables", len(rows))
        elif len(rows) == 1:
            object.__setattr__(self, "table_rows", rows * self.tables)
        elif len(rows) != self.tables:
            raise InputError(
                f"model.tables is {self.tables}, but model.table_rows lists {len(rows)} tables"
            )
        if self.mlp_sizes == "nvidia":
            if self.dense_features is None:
                raise InputError(
                    "model.dense_features is missing: with model.mlp_sizes: nvidia "
                    "model.bottom_mlp leaves the input width out, so it must be given"
                )
        else:
            if len(self.bottom_mlp) < 2:
                raise InputError(
                    f"model.bottom_mlp has {len(self.bottom_mlp)} width, expected at least 2 "
                    "(input and output; model.mlp_sizes: facebook includes the input)"
                )
            if self.dense_features is None:
                object.__setattr__(self, "dense_features", self.bottom_mlp[0])
            elif self.dense_features != self.bottom_mlp[0]:
                raise InputError(
                    f"model.dense_features is {self.dense_features}, but model.bottom_mlp "
                    f"starts with {self.bottom_mlp[0]} (model.mlp_sizes: facebook includes "
                    "the input width)"
                )
        if self.bottom_mlp[-1] != self.embedding_dim:
            raise InputError(
                f"model.bottom_mlp ends in {self.bottom_mlp[-1]}, but model.embedding_dim is "
                f"{self.embedding_dim}: the interaction needs them equal"
            )
        if self.top_mlp[-1] != 1:
            raise InputError(
                f"model.top_mlp ends in {self.top_mlp[-1]}, expected 1 (one click probability)"
            )
        if len(self.loss_weights) != 2:
            raise InputError(
                f"model.loss_weights has {len(self.loss_weights)} numbers, expected 2 "
                "(for the targets 0 and 1)"
            )

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        """Widths of the bottom MLP, input included, whichever way they were counted."""
        assert self.dense_features is not None
        if self.mlp_sizes == "facebook":
            return self.bottom_mlp
        return (self.dense_features, *self.bottom_mlp)

    @property
    def interaction_width(self) -> int:
        """Width of the interaction's output, the input of the top MLP.

        dot: F(F-1)/2 + d (or F(F+1)/2 + d with products with itself); cat: F d;
        F = number of tables + 1, d = embedding_dim (Naumov et al., section 2).
        """
        features = len(self.table_rows) + 1
        if self.interaction == "cat":
            return features * self.embedding_dim
        pairs = features * (features + (1 if self.interaction_itself else -1)) // 2
        return pairs + self.embedding_dim

    @property
    def top_widths(self) -> tuple[int, ...]:
        """Widths of the top MLP, input included."""
        return (self.interaction_width, *self.top_mlp)


@dataclass(frozen=True)
class DataConfig:
    """Where batches come from."""

    generator: str = setting(
        "facebook",
        "'facebook_loop': facebookresearch/dlrm's per-sample Python loop; 'facebook': the same "
        "stream bit for bit, vectorised; 'uniform', 'zipf': the same bag law without "
        "deduplication, indices uniform or by a power law, on CPU or GPU; 'dataset': the files in "
        "path; 'teacher': rows by the power law and labels of a planted model (docs/datasets.md)",
        choices=("facebook_loop", "facebook", "uniform", "zipf", "dataset", "teacher"),
    )
    path: str = setting(
        "",
        "with dataset: its folder, relative to where dlrm is called; model.table_rows and "
        "dense_features may be left out where the data set says them",
    )
    format: str = setting(
        "split_binary",
        "with dataset: 'split_binary' (NVIDIA's, with feature_spec.yaml), 'deepspark_dist' (the "
        "same file names, other types), 'terabyte' (terabyte_processed_*.bin, 40 x int32)",
        choices=("split_binary", "deepspark_dist", "terabyte"),
    )
    order: str = setting(
        "sequential",
        "with dataset: batches in the order of the files, or 'shuffled' anew each epoch (whole "
        "batches of neighbouring samples; the order follows from training.seed)",
        choices=("sequential", "shuffled"),
    )
    teacher_seed: int = setting(
        1, "with teacher: seed of the planted model (training.seed draws the samples)", minimum=0
    )
    teacher_strength: float = setting(
        1.38,
        "with teacher: standard deviation of its logit; 1.38 gives an AUC near 0.80",
        minimum=0.0,
        maximum=8.0,
    )
    teacher_rows: int = setting(
        64, "with teacher: how many of each table's hottest rows have an effect", minimum=1
    )
    indices_per_lookup: int = setting(
        100, "bag size, or its upper bound with random pooling", minimum=1
    )
    fixed_pooling: bool = setting(
        False,
        "true: every bag holds indices_per_lookup indices; false: max(1, round(r k)), r ~ U[0,1)",
    )
    zipf_exponent: float = setting(
        1.05, "with zipf and teacher: exponent a of P(row i) ~ (i+1)^-a, row 0 hottest", minimum=0.0
    )
    round_targets: bool = setting(False, "targets 0 or 1 instead of uniform in [0,1)")
    loader: str = setting(
        "synchronous",
        "'synchronous': made in the main thread between steps, as in the experiment; "
        "'prefetch': made by a background thread while the step computes",
        choices=("synchronous", "prefetch"),
    )
    prefetch_batches: int = setting(2, "batches kept ready by the prefetching loader", minimum=1)
    place: str = setting(
        "cpu",
        "where uniform and zipf batches are made: 'cpu', or 'device' (straight on the GPU)",
        choices=("cpu", "device"),
    )

    def __post_init__(self) -> None:
        coerce_section(self, "data")
        if self.one_hot:
            # one row of each table a sample, whatever the other laws' settings are
            object.__setattr__(self, "indices_per_lookup", 1)
            object.__setattr__(self, "fixed_pooling", True)
        if (self.generator == "dataset") != bool(self.path):
            raise InputError(
                f"data.generator is {self.generator!r}, but data.path is {self.path!r}: a path is "
                "for generator 'dataset', and that needs one"
            )
        if self.place == "device" and self.one_hot:
            raise InputError(
                f"data.place is 'device', but data.generator is {self.generator!r}, whose batches "
                "are made on the CPU; choose uniform or zipf, or place: cpu"
            )
        if self.place == "device" and self.generator.startswith("facebook"):
            raise InputError(
                f"data.place is 'device', but data.generator is {self.generator!r}: facebook's "
                "stream is numpy's and exists on the CPU only; choose uniform or zipf"
            )
        if self.place == "device" and self.loader == "prefetch":
            raise InputError(
                "data.place is 'device', but data.loader is 'prefetch': batches made on the "
                "device need no prefetching; choose data.loader: synchronous"
            )

    @property
    def one_hot(self) -> bool:
        """Every bag holds one row, as in Criteo's data."""
        return self.generator in ("dataset", "teacher")
