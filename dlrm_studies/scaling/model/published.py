"""Scaling that others have published, beside what the model predicts for their machines.

Nothing here was measured by us. A prediction starts from the same source's figure for one
device (``published.csv``), at its batch size: how that iteration divides among the parts is
taken from a data sheet's ceilings, what the host adds from the number of operators; so it tests
the model of communication as far as published inputs allow, and the table says what was not
published.
Where a source has three sizes, the second row of the largest starts from the other two: what
the middle one takes beyond the prediction is carried over as a cost of every iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from dlrm_core.config import (
    PRESETS,
    DataConfig,
    ModelConfig,
    Parameters,
    TrainingConfig,
    load_parameters,
)
from dlrm_studies.published import read_published
from dlrm_studies.scaling.model.choice import best_sharding
from dlrm_studies.scaling.model.communication import STUDY
from dlrm_studies.scaling.model.links import Network, Range, link
from dlrm_studies.scaling.model.prediction import (
    ComputeProfile,
    PartCost,
    Prediction,
    Setting,
    ceiling_profile,
    published_profile,
)
from dlrm_studies.scaling.model.sharding import Plan, make_plan
from dlrm_workbook.analysis.devices import DATA_SHEET, device
from dlrm_workbook.analysis.work import part_work
from dlrm_workbook.datasets.generate import VARIANTS

OPERATOR_US = 10.0
"""What the host of an eager framework takes to launch an operator; see ``dispatch_us`` and
``launch_us`` of any profile made on a GPU; 0 to three times as much is the range."""

XEON = {
    "device": "Xeon Platinum 8280",
    "source": DATA_SHEET,
    # Intel ARK: 28 cores, 2.7 GHz, two AVX-512 FMA units; six channels of DDR4-2933
    "peak_gflops": {"fp32": 28 * 2.7 * 64},
    "stream": [{"bytes": 1 << 34, "read_gb_per_s": 140.8, "copy_gb_per_s": 140.8}],
    "last_level_cache_bytes": 38_500_000,
}


ASSUMED = {
    "NVIDIA large": "{link}: collectives' share of the data sheet's rate; how an iteration of one "
    "GPU divides among parts; one GPU ran the small model (26 smaller tables)",
    "DeepSpark": "the cards' links ({link} taken) and ceilings (a V100's taken for the division "
    "among parts); the table beside these figures prints a scalability of 0.97, they make 0.22",
    "Small": "its scaling was not at hand as numbers: volumes are compared in their own table",
}
"""Model to what its source leaves out and the prediction had to take from elsewhere."""


@dataclass(frozen=True)
class PublishedSeries:
    """One machine and precision at several numbers of devices.

    Attributes:
        rates: devices to samples per second, as printed; NaN: drawn, but no number printed.
        batch: samples of an iteration over all devices.
        assumed: what the source leaves out and the prediction had to take from elsewhere.
    """

    source: str
    hardware: str
    model: str
    precision: str
    batch: int
    rates: Mapping[int, float]
    network: Network
    ceilings: Mapping[str, Any]

    @property
    def assumed(self) -> str:
        return ASSUMED[self.model].format(link=self.network.name)


@cache
def _figures() -> pd.DataFrame:
    """``published.csv`` of this folder: a row a machine, precision and number of devices."""
    return read_published(Path(__file__).with_name("published.csv"))


@cache
def published_series() -> tuple[PublishedSeries, ...]:
    """Everything published that has a figure for one device and for more."""
    figures = _figures()
    figures = figures[figures["model"].isin(list(ASSUMED))]
    keys = ["source", "hardware", "model", "precision", "batch_samples", "device", "link"]
    series = []
    for key, rows in figures.groupby(keys, sort=False):
        source, hardware, model, precision, batch, kind, joined = cast(tuple[Any, ...], key)
        rates = zip(rows["devices"].tolist(), rows["samples_per_second"].tolist(), strict=True)
        ceilings = XEON if kind == XEON["device"] else device(kind).ceilings()
        about = (source, hardware, model, precision, int(batch))
        series.append(PublishedSeries(*about, dict(rates), Network(link(joined)), ceilings))
    return tuple(series)


def published_scaling() -> pd.DataFrame:
    """All published scaling with our prediction beside each.

    Returns:
        ``source``, ``hardware``, ``model``, ``precision``, ``devices``, ``batch_size`` (over
        all), ``published`` and ``predicted`` (with ``_low`` and ``_high``; samples/s),
        ``error`` (predicted over published, less 1; NaN where no number is printed),
        ``basis`` ("1" or "1 and 8": devices whose published figures the prediction starts
        from), ``not_published`` (what had to be assumed), ``number`` (of the source, from 1).
    """
    rows: list[dict[str, Any]] = []
    for series in published_series():
        parameters = parameters_of(series)
        start = _profile(series, parameters)
        counts = [count for count in series.rates if count > 1]
        for count in counts:
            prediction = _predicted(series, parameters, count, start)
            rows.append(_row(series, count, prediction, "1"))
        if len(counts) > 1 and math.isfinite(series.rates[counts[0]]):
            carried = _carried(series, parameters, counts[0], start)
            prediction = _predicted(series, parameters, counts[-1], carried)
            rows.append(_row(series, counts[-1], prediction, f"1 and {counts[0]}"))
    table = pd.DataFrame(rows)
    return table.assign(number=pd.factorize(table["source"])[0] + 1)


def parameters_of(series: PublishedSeries) -> Parameters:
    """The model that was run, with the global batch."""
    precision = {"mixed": "fp16"}.get(series.precision, "fp32")
    training = TrainingConfig(
        batch_size=series.batch,
        precision=precision,
        tf32=series.precision == "TF32",
        device="cpu" if series.ceilings is XEON else "cuda",
        embedding_backend="fused",
    )
    one_hot = DataConfig(generator="uniform", indices_per_lookup=1, fixed_pooling=True)
    if series.model == "Small":
        study = STUDY[0].parameters(series.batch)
        return replace(study, training=training)
    if series.model == "DeepSpark":
        model = _criteo("deepspark_synthetic", (512, 256, 64), (512, 512, 256, 1))
    else:
        model = _criteo("criteo_t3_synthetic", (512, 256, 128), (1024, 1024, 512, 256, 1))
    return Parameters(model=model, data=one_hot, training=training)


def _criteo(variant: str, bottom: tuple[int, ...], top: tuple[int, ...]) -> ModelConfig:
    return ModelConfig(
        mlp_sizes="nvidia",
        dense_features=13,
        bottom_mlp=bottom,
        top_mlp=top,
        embedding_dim=bottom[-1],
        tables=None,
        table_rows=VARIANTS[variant].table_rows,
    )


def _profile(series: PublishedSeries, parameters: Parameters) -> ComputeProfile:
    """Costs of one device: the published time, of which the host's launches do not shrink."""
    profile = published_profile(parameters, series.ceilings, series.rates[1], series.source)
    if parameters.training.device != "cuda":
        return profile
    # on one device kernels are long enough to hide the launches of the next
    operators = float(part_work(parameters, device="cuda")["operators"].sum())
    # from none to three times as much
    return _with_host(profile, PartCost(1e-3 * OPERATOR_US * operators, 0.0, 2.0))


def _carried(
    series: PublishedSeries, parameters: Parameters, count: int, start: ComputeProfile
) -> ComputeProfile:
    """What ``count`` devices took beyond the prediction without a host, as a fixed cost."""
    bare = _with_host(start, PartCost(0.0, 0.0, 2.0))
    beyond = (
        1e3 * series.batch / series.rates[count]
        - _predicted(series, parameters, count, bare).mid_ms
    )
    return _with_host(start, PartCost(max(0.0, beyond), 0.0, 0.3))


def _with_host(profile: ComputeProfile, cost: PartCost) -> ComputeProfile:
    """The same with a cost of the host in every iteration."""
    host = ("other", "forward")
    return replace(
        profile, costs={number: {**costs, host: cost} for number, costs in profile.costs.items()}
    )


def _predicted(
    series: PublishedSeries, parameters: Parameters, count: int, profile: ComputeProfile
) -> Prediction:
    plan = make_plan(parameters, count, "table_wise")
    return Setting(parameters, series.network, profile).predict(plan, series.batch)


def _row(series: PublishedSeries, count: int, prediction: Prediction, basis: str) -> dict[str, Any]:
    published = series.rates[count]
    mid, low, high = (
        1e3 * series.batch / ms for ms in (prediction.mid_ms, prediction.high_ms, prediction.low_ms)
    )
    return {
        "source": series.source,
        "hardware": series.hardware,
        "model": series.model,
        "precision": series.precision,
        "devices": count,
        "batch_size": series.batch,
        "published": published,
        "predicted_low": low,
        "predicted": mid,
        "predicted_high": high,
        "error": mid / published - 1,
        "basis": basis,
        "not_published": series.assumed,
    }


# MLPerf Training v4.0, DLRM-DCNv2: machines that nobody here has, from data sheets alone.

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
        ``hardware``, ``devices``, ``batch_size``, ``program`` (what the predicted program does:
        a row adds one thing to those above it), ``sharding``, ``published``, ``predicted``,
        ``predicted_low``, ``predicted_high`` (samples/s), ``error`` (predicted over published,
        less 1), ``compute_ms``, ``exposed_ms`` (of a predicted iteration). The last row of a
        machine is nearest to the program that was submitted. ``attrs["source"]``.
    """
    figures = _figures()
    figures = figures[figures["model"] == "DLRM-DCNv2"]
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
    training = replace(
        preset.training, batch_size=batch, precision="fp16", device="cuda", fused_optimizer=True
    )
    parameters, share = replace(preset, training=training), batch // devices
    profile = ceiling_profile(parameters, device(gpu).ceilings(), (share // 16, share // 4, share))
    network = Network(link("NVLink 4 (H100)"), link("InfiniBand NDR"), GPUS_PER_NODE)
    return Setting(parameters, network, profile, memory_bytes=1e9 * device(gpu).memory_gb)
