"""NVIDIA's feature_spec.yaml, as NVIDIA's own writer makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dlrm_core.base.files import write_text
from dlrm_core.data.files.spec import FILE_NAME, index_dtype

SPLITS = ("train", "test")


def write_spec(
    folder: Path,
    dense_features: int,
    table_rows: Sequence[int],
    metadata: Mapping[str, Any],
    splits: Sequence[str] = SPLITS,
) -> None:
    """Write feature_spec.yaml, whole or not at all; NVIDIA's writer makes the same bytes.
    Categorical features are literally named ``cat_0.bin``, so that their files are. An InputError
    says that the folder cannot be written, or that a table has too many rows for int32."""
    numerical = [f"num_{i}" for i in range(dense_features)]
    categorical = [f"cat_{i}.bin" for i in range(len(table_rows))]
    features: dict[str, Any] = {
        name: {"dtype": str(index_dtype(rows)), "cardinality": rows}
        for name, rows in zip(categorical, table_rows, strict=True)
    }
    features |= {name: {"dtype": "float16"} for name in numerical}
    features["label"] = {"dtype": "bool"}
    chunks = [("numerical.bin", numerical), ("label.bin", ["label"])]
    chunks += [(name, [name]) for name in categorical]
    sections = {
        "feature_spec": features,
        "source_spec": {
            split: [
                {
                    "type": "split_binary",
                    # one list object appears in YAML as an anchor, and theirs is one only here
                    "features": names if names is numerical else list(names),
                    "files": [f"{split}/{file}"],
                }
                for file, names in chunks
                if names
            ]
            for split in splits
        },
        "channel_spec": {"categorical": categorical, "numerical": numerical, "label": ["label"]},
        "metadata": dict(metadata),
    }
    write_text(folder / FILE_NAME, yaml.safe_dump(sections) + "\n")
