"""DeepSpark's preset on a small, made-up Criteo Terabyte."""

from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core.config import load_parameters

ROOT = Path(__file__).resolve().parents[1]


def deepspark(folder: Path) -> dict[str, Any]:
    """The preset with small tables, one epoch and the files of :func:`make_terabyte`."""
    tree = load_parameters(ROOT / "parameters" / "deepspark.yaml").to_sections()
    tree["model"]["table_rows"] = [4, 50, 7, *[9] * 23]
    tree["data"] |= {"path": str(folder), "drop_last": True}
    tree["training"] |= {"batch_size": 32, "epochs": 1.0, "lr_warmup_steps": 0, "threads": 1}
    tree["training"] |= {"device": "cpu", "auc_target": None, "evals_per_epoch": None}
    return tree


def make_terabyte(folder: Path, train: int, test: int) -> None:
    """Write so many samples of each split: rows of 40 int32, with random labels."""
    folder.mkdir()
    random = np.random.default_rng(3)
    for split, samples in (("train", train), ("test", test)):
        rows = random.integers(0, 4, (samples, 40), dtype=np.int32)
        rows[:, 0] &= 1
        rows.tofile(folder / f"terabyte_processed_{split}.bin")
