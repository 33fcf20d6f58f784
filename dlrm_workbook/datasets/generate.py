"""Synthetic data sets in NVIDIA's layout, at the speed of the disk.

Every value is a function of its place (:mod:`dlrm_core.data.files.teacher`), so blocks are
made by all threads in any order.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.data.files.spec import index_dtype
from dlrm_core.data.files.teacher import Law, SampleMaker, Variant
from dlrm_workbook.datasets.best_auc import best_figures, score_test_set
from dlrm_workbook.datasets.resumable import (
    OpenFiles,
    Workplace,
    need_space,
    progress_bar,
    threaded,
    workplace,
)
from dlrm_workbook.datasets.write_spec import SPLITS, write_spec
from dlrm_workbook.ground.bar import Bar
from dlrm_workbook.ground.tables import rows_of

KEPT_ROWS = 100
"""Tables of at most so many rows keep them when a variant is scaled down."""


VARIANTS = {
    row["variant"]: Variant(row["variant"], 13, tuple(map(int, row["table_rows"].split())))
    for row in rows_of(__file__, "variants.csv")
}
"""Published variants. Cardinalities are those of NVIDIA (DeepLearningExamples, DLRM_and_DCNv2,
generate_feature_spec: Criteo Terabyte) and of DeepSpark."""


def scaled_variant(variant: Variant, scale: float) -> Variant:
    """The same variant with ``scale`` times the rows in every table above 100 rows; an InputError
    says that the scale is not in (0, 1]."""
    if not 0.0 < scale <= 1.0:
        raise InputError(f"--scale is {scale:g}, expected a number above 0 and at most 1")
    # a small table is below both, and keeps its rows
    rows = tuple(max(min(r, KEPT_ROWS), round(r * scale)) for r in variant.table_rows)
    return dataclasses.replace(variant, table_rows=rows)


BLOCK = 1 << 16
"""Samples made at a time; a multiple of 64, so that a block's labels begin at a whole word."""


@dataclass(frozen=True)
class Generated:
    folder: Path
    bytes: int
    bytes_written_now: int
    seconds: float


def generate(law: Law, samples: dict[str, int], target: Path, threads: int) -> Generated:
    """Write a data set, or go on with one that was interrupted; the folder ``target`` appears when
    all is written. ``samples`` are numbers of them in ``train`` and ``test``, at least 1;
    ``threads`` do not change a byte. An InputError says that the target exists, was begun with
    something else, or does not fit."""
    started = time.perf_counter()
    variant = law.variant
    sample_bytes = bytes_of_sample(variant)
    total = sample_bytes * sum(samples.values())
    request = {"law": dataclasses.asdict(law), "samples": samples}
    with workplace(target, request, "dlrm data generate") as place:
        if place is None:
            return Generated(target, total, 0, time.perf_counter() - started)
        done = dict.fromkeys(SPLITS, 0) | place.done
        before = sum(done.values())
        new_bytes = total - sample_bytes * before
        need_space(place.folder, new_bytes)
        with progress_bar("generating", "samples", sum(samples.values()), before) as bar:
            for split in SPLITS:
                _write_split(place, law, split, samples[split], done, threads, bar)
        metadata = metadata_of(law, samples)
        write_spec(place.folder, variant.dense_features, variant.table_rows, metadata)
    seconds = time.perf_counter() - started
    return Generated(target, total, new_bytes, seconds)


def bytes_of_sample(variant: Variant) -> int:
    """Bytes of a sample in NVIDIA's layout: label, dense features, a row of each table."""
    rows = sum(index_dtype(rows).itemsize for rows in variant.table_rows)
    return 1 + 2 * variant.dense_features + rows


def _write_split(
    place: Workplace,
    law: Law,
    split: str,
    samples: int,
    done: dict[str, int],
    threads: int,
    bar: Bar,
) -> None:
    maker = SampleMaker(law, split)
    names = ["label.bin", *(f"cat_{t}.bin" for t in range(len(maker.dtypes)))]
    names += ["numerical.bin"] if maker.dense_features else []
    with OpenFiles(place, place.folder / split, names) as files:

        def make(start: int) -> tuple[int, int]:
            count = min(BLOCK, samples - start)
            labels, dense, rows, _ = maker.block(start, count)
            # without dense features there is no file of them
            arrays = [labels, *rows, dense][: len(names)]
            for name, array in zip(names, arrays, strict=True):
                files.write(name, array, start)
            return count, sum(array.nbytes for array in arrays)

        starts = range(done[split], samples, BLOCK)
        for count, size in threaded(make, starts, threads, 3 * threads):
            done[split] += count
            bar.add(count)
            files.written(size, done)
        files.finish(done)


def metadata_of(law: Law, samples: dict[str, int]) -> dict[str, Any]:
    """What the data set's ``metadata`` say: how it was made and, with a teacher, the best AUC.

    ``teacher_auc_on_test`` is the teacher's own AUC on the labels of this very test set, and
    so what a model's AUC there is to be compared with: the luck of the draw is in both.
    """
    variant = law.variant
    facts: dict[str, Any] = {
        "made_by": "dlrm data generate",
        "variant": variant.name,
        "alpha": variant.alpha,
        "seed": law.seed,
        "samples": dict(samples),
        "labels": "random" if law.teacher is None else "teacher",
    }
    if law.teacher is None:
        return facts | {"bayes_auc": 0.5}
    facts["teacher"] = dataclasses.asdict(law.teacher) | {"shares": list(law.teacher.shares)}
    facts |= best_figures(law)
    histogram = score_test_set(law, samples["test"])
    auc, uncertainty = histogram.auc()
    # one class alone has no AUC
    if np.isfinite(auc):
        facts |= {"teacher_auc_on_test": auc, "teacher_auc_on_test_uncertainty": uncertainty}
    facts["teacher_log_loss_on_test"] = histogram.log_loss()
    return facts
