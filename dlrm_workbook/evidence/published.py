"""Throughputs that others have published: other hardware, mostly other models.

They show the order of magnitude of a good figure, never who is faster: we measured none of
them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published figure.

    Attributes:
        source: who published it.
        model: the model's name in the source.
        mode: ``training`` or ``inference``.
        batch: samples an iteration over all devices; None where the source does not say.
        samples_per_second: over all devices.
        latency_ms: mean of an inference step.
        power_w: over all devices.
        memory_gb: of each device.
        auc: reached on Criteo Terabyte.
    """

    source: str
    hardware: str
    model: str
    mode: str
    precision: str
    batch: int | None
    samples_per_second: float
    latency_ms: float | None = None
    power_w: float | None = None
    memory_gb: float | None = None
    auc: float | None = None

    @property
    def protocol(self) -> str:
        """The way of counting, by its name in :mod:`dlrm_workbook.studies.protocols.measure`.

        Papers count as facebook does.
        """
        return {NVIDIA: "nvidia", DEEPSPARK: "deepspark"}.get(self.source, "facebook")


NOT_SAID = "not said"
NVIDIA = "NVIDIA DeepLearningExamples, DLRM for PyTorch"
DEEPSPARK = "DeepSpark DeepSparkHub, DLRM"
KALAMKAR = "Kalamkar et al. 2020 (arXiv:2005.04680)"
NVIDIA_AUC = (0.8025, 0.8028)
"""Of NVIDIA's trainings to the end, least and most, on Criteo Terabyte."""

PUBLISHED = (
    Published(NVIDIA, "1 × A100-80GB", "small", "training", "mixed", 65536, 4.55e6),
    Published(NVIDIA, "1 × A100-80GB", "small", "training", "TF32", 65536, 2.84e6),
    Published(NVIDIA, "8 × A100-80GB", "large", "training", "mixed", None, 13.8e6),
    Published(NVIDIA, "8 × A100-80GB", "large", "training", "TF32", None, 10.9e6),
    Published(NVIDIA, "8 × A100-80GB", "extra large", "training", "mixed", None, 11.5e6),
    Published(NVIDIA, "8 × A100-80GB", "extra large", "training", "TF32", None, 9.76e6),
    Published(NVIDIA, "1 × V100-32GB", "small", "training", "mixed", 65536, 2.23e6),
    Published(NVIDIA, "1 × V100-32GB", "small", "training", "FP32", 65536, 0.663e6),
    Published(NVIDIA, "1 × V100-32GB, second system", "small", "training", "mixed", 65536, 2.44e6),
    Published(NVIDIA, "1 × V100-32GB, second system", "small", "training", "FP32", 65536, 0.698e6),
    Published(
        NVIDIA, "1 × A100 + CPU embeddings", "extra large", "training", NOT_SAID, None, 768e3
    ),
    Published(NVIDIA, "2 × EPYC 7742", "extra large", "training", NOT_SAID, None, 17.7e3),
    Published(NVIDIA, "1 × A100-80GB", "small", "inference", "mixed", 2048, 1.48e6, 1.38),
    Published(NVIDIA, "1 × A100-80GB", "small", "inference", "TF32", 2048, 1.38e6, 1.49),
    Published(DEEPSPARK, "1 × BI-V100", "DLRM", "training", NOT_SAID, None, 196_958, auc=0.75),
    Published(DEEPSPARK, "8 × BI-V100", "DLRM", "training", NOT_SAID, None, 346_555, auc=0.75),
    Published(
        *(DEEPSPARK, "8 × BI-V100", "DLRM", "training", "mixed", None, 793_486),
        power_w=8 * 60.0,
        memory_gb=3.7,
    ),
    # milliseconds an iteration in the paper: 2048 samples in 38 ms and in 62 ms
    Published(KALAMKAR, "1 CPU socket", "Small", "training", "FP32", 2048, 2048 / 0.038),
    Published(KALAMKAR, "1 × V100, Caffe2", "Small", "training", "FP32", 2048, 2048 / 0.062),
)
