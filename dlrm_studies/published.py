"""Results that others have published, as tables: other hardware, mostly other models.

They show the order of magnitude of a good figure, never who is faster: we measured none of
them. NVIDIA's and DeepSpark's were read on the pages that ``source`` names.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd


@cache
def published_runs() -> pd.DataFrame:
    """Trainings and predictions, one a row (``published.csv``); not to be changed.

    Returns:
        ``source`` (page or paper), ``protocol`` (the way of counting, by its name in
        :mod:`dlrm_studies.protocols.measure`; papers count as facebook does), ``mode``
        (``training`` or ``inference``), ``hardware``, ``model`` (its name in the source),
        ``precision``, ``batch_samples`` (of an iteration over all devices),
        ``samples_per_second`` (over all devices), ``latency_ms`` (mean of an inference step),
        ``auc`` (reached on Criteo Terabyte), ``minutes_to_train`` (to ``auc``), ``times_cpu``
        (speed over that of the same model on CPUs alone, as printed), ``criterion`` (when the
        training counts as converged), ``configuration`` (what else is said of how it was run),
        ``power_w`` (over all devices), ``scalability`` (speed-up over devices as a share of the
        ideal, as printed), ``memory_gb`` (of each device), ``stability`` (as printed; none says
        how it is counted). What a source does not say is NaN or empty.
    """
    return read_published(Path(__file__).with_name("published.csv"))


def read_published(file: Path) -> pd.DataFrame:
    """A file of published figures, with samples per second where a source has ms an iteration."""
    table = pd.read_csv(file)
    speeds = 1e3 * table["batch_samples"] / table.pop("ms_per_iteration")
    table["samples_per_second"] = table["samples_per_second"].fillna(speeds)
    words = table.select_dtypes(object).columns
    return table.fillna(dict.fromkeys(words, ""))
