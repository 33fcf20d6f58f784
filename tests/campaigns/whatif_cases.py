"""The changes that predictions are held against: three shapes, and what is changed on each."""

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "experiment: 8 x 1,000,000 rows, up to 100 a bag": {
        "model": {"table_rows": 1_000_000, "tables": 8, "init": "torch"},
        "data": {"generator": "facebook", "indices_per_lookup": 100},
        "training": {"batch_size": 2048},
    },
    "many small tables: 26 x 100,000 rows, up to 10 a bag": {
        "model": {
            "mlp_sizes": "nvidia",
            "dense_features": 13,
            "bottom_mlp": [512, 256, 64],
            "top_mlp": [512, 512, 256, 1],
            "embedding_dim": 64,
            "tables": 26,
            "table_rows": 100_000,
            "loss": "bce",
            "init": "torch",
        },
        "data": {"generator": "uniform", "indices_per_lookup": 10},
        "training": {"batch_size": 2048},
    },
    "mostly MLPs: 4 x 100,000 rows, up to 20 a bag": {
        "model": {
            "mlp_sizes": "facebook",
            "bottom_mlp": [256, 1024, 1024, 128],
            "top_mlp": [2048, 2048, 1024, 1],
            "embedding_dim": 128,
            "tables": 4,
            "table_rows": 100_000,
            "init": "torch",
        },
        "data": {"generator": "facebook_loop", "indices_per_lookup": 20},
        "training": {"batch_size": 1024},
    },
}


CHANGES: dict[str, list[list[dict[str, Any]]]] = {
    "first": [
        [
            {"training.batch_size": 1024},
            {"model.embedding_dim": 128},
            {"data.indices_per_lookup": 50},
            {"model.tables": 4},
            {"data.loader": "prefetch"},
            {"training.embedding_backend": "fused"},
            {"training.precision": "bf16"},
        ],
        [
            {"training.batch_size": 4096},
            {"model.embedding_dim": 32},
            {"data.fixed_pooling": True},
            {"model.interaction": "cat"},
            {"training.fused_optimizer": True},
            {"training.optimizer": "rowwise_adagrad"},
        ],
        [
            {"data.generator": "facebook"},
            {"data.generator": "facebook", "data.loader": "prefetch"},
            {"model.top_mlp": [1024, 1024, 1]},
            {"training.batch_size": 2048},
            {"training.precision": "bf16"},
        ],
    ],
    "second": [
        [
            {"training.batch_size": 4096},
            {"model.embedding_dim": 32},
            {"data.indices_per_lookup": 25, "model.tables": 16},
            {"data.generator": "zipf"},
        ],
        [
            {"training.batch_size": 512},
            {"model.tables": 13, "model.top_mlp": [1024, 1]},
            {"data.loader": "prefetch"},
            {"training.embedding_backend": "fused", "training.batch_size": 4096},
        ],
        [
            {"model.bottom_mlp": [256, 512, 128]},
            {"data.loader": "prefetch"},
            {"training.batch_size": 256, "data.generator": "uniform"},
            {"training.threads": 2},
        ],
    ],
}


STACKS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    # of each shape: sections that differ from above, and changes put on top of each other
    (
        {"data": {"generator": "facebook_loop", "indices_per_lookup": 100}},
        [
            {"data.generator": "facebook"},
            {"training.precision": "bf16"},
            {"training.embedding_backend": "fused"},
        ],
    ),
    ({}, [{"training.embedding_backend": "fused"}, {"training.precision": "bf16"}]),
    (
        {},
        [
            {"data.generator": "facebook"},
            {"training.fp32_matmul": "onednn"},
            {"training.embedding_backend": "fused"},
        ],
    ),
]
"""Changes as a verdict puts them together; whole steps under them are timed by a profile run."""
