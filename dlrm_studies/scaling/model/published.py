"""MLPerf Training v4.0, DLRM-DCNv2, beside what the model predicts for its machines.

Nothing here was measured by us: predictions start from data sheets alone, without any figure
of a run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.config import PRESETS, load_parameters
from dlrm_studies.published import read_published
from dlrm_studies.scaling.model.choice import best_sharding
from dlrm_studies.scaling.model.links import Network, Range, link
from dlrm_studies.scaling.model.prediction import Setting, ceiling_profile
from dlrm_studies.scaling.model.sharding import Plan, make_plan
from dlrm_workbook.analysis.devices import device

GPUS_PER_NODE = 8

PROGRAMS: dict[str, dict[str, Any]] = {
    "as this workbook trains": {},
    "and 16-bit exchanges": {"number_bytes": 2},
    "and the next batch ahead": {"ahead": True},
    "and tables cut inside nodes": {},
}
"""What the predicted program does, each beside what those above it do, as ``Setting`` takes it.

The submitted program (NVIDIA-Merlin/HugeCTR, samples/dlrm/train.py) does all four on several
nodes: ``use_mixed_precision``, ``train_inter_iteration_overlap`` and ``--sharding_plan
hier_auto``; on one node its tables are on single GPUs or cut, as the best plan found here has
them.
"""


class NodePlan(Plan):
    """Whole tables on nodes, the rows of each on all GPUs of its node: all GPUs work alike."""

    def work(self) -> np.ndarray:
        """As :meth:`Plan.work`."""
        return np.full(self.ranks, 1.0 / self.ranks)

    def columns_sent(self) -> np.ndarray:
        """As :meth:`Plan.columns_sent`, after the sums within nodes."""
        return np.full(self.ranks, self.dim * len(self.tables) / self.ranks)


class NodeNetwork(Network):
    """All-to-all of sums that the GPUs of a node first add up among themselves."""

    def time_ms(self, collective: str, ranks: int, payload: float) -> Range:
        """As :meth:`Network.time_ms`; the payload is what a GPU sends to other nodes."""
        if collective != "alltoall" or self.between is None:
            return super().time_ms(collective, ranks, payload)
        local = self.ranks_per_node
        return self.inside.time_ms("reduce_scatter", local, payload * local) + self.between.time_ms(
            "alltoall", -(-ranks // local), payload
        )


@cache
def mlperf_scaling() -> pd.DataFrame:
    """MLPerf's points and their predictions from data sheets, without any figure of a run.

    Returns:
        Columns as in ``dlrm help columns mlperf_scaling``. The last row of a machine is nearest
        to the program that was submitted. ``attrs["source"]``.
    """
    figures = read_published(Path(__file__).with_name("published.csv"))
    names = ["hardware", "device", "devices", "batch_samples", "samples_per_second"]
    rows = []
    for hardware, gpu, devices, batch, rate in figures[names].itertuples(index=False):
        setting = _mlperf_setting(gpu, devices, batch)
        for program, does in PROGRAMS.items():
            setting = replace(setting, **does)
            if program == "and tables cut inside nodes":
                if devices <= GPUS_PER_NODE:
                    continue
                whole = make_plan(setting.parameters, devices, "table_wise", idle=True)
                plan = NodePlan(whole.ranks, whole.dim, whole.tables, whole.lookups)
                apart = NodeNetwork(**vars(setting.network))
                prediction, name = replace(setting, network=apart).predict(plan, batch), "by node"
            else:
                best = best_sharding(setting, devices, batch).prediction
                assert best is not None
                prediction, name = best, best.plan.name
            rows.append(
                {
                    "hardware": hardware,
                    "devices": devices,
                    "batch_size": batch,
                    "program": program,
                    "sharding": name,
                    "published": rate,
                    "predicted_low": 1e3 * batch / prediction.high_ms,
                    "predicted": prediction.samples_per_second,
                    "predicted_high": 1e3 * batch / prediction.low_ms,
                    "error": prediction.samples_per_second / rate - 1,
                    "compute_ms": prediction.compute_ms,
                    "exposed_ms": prediction.exposed_ms,
                }
            )
    table = pd.DataFrame(rows)
    table.attrs["source"] = figures["source"].iloc[0]
    return table


def _mlperf_setting(gpu: str, devices: int, batch: int) -> Setting:
    """The preset of MLPerf's reference in fp16, on GPUs of a data sheet and named links."""
    preset = load_parameters(str(PRESETS / "mlperf_dcn.yaml"))
    fast = {"precision": "fp16", "device": "cuda", "fused_optimizer": True}
    parameters, share = preset.with_training(batch_size=batch, **fast), batch // devices
    profile = ceiling_profile(parameters, device(gpu).ceilings(), (share // 16, share // 4, share))
    network = Network(link("NVLink 4 (H100)"), link("InfiniBand NDR"), GPUS_PER_NODE)
    return Setting(parameters, network, profile, memory_bytes=1e9 * device(gpu).memory_gb)
