"""Results that others have published: other hardware, mostly other models.

They show the order of magnitude of a good figure, never who is faster: we measured none of
them. NVIDIA's and DeepSpark's were read on the pages that :data:`NVIDIA` and :data:`DEEPSPARK`
name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published run.

    Attributes:
        source: page or paper.
        model: the model's name in the source.
        mode: ``training`` or ``inference``.
        batch: samples an iteration over all devices; None where the source does not say.
        samples_per_second: over all devices.
        latency_ms: mean of an inference step.
        auc: reached on Criteo Terabyte.
        minutes: of the training that reached ``auc``.
        times_cpu: speed over that of the same model on CPUs alone, as the source prints it.
        criterion: when the training counts as converged.
        configuration: what else the source says of how it was run.
        power_w: over all devices.
        scalability: speed-up over devices as a share of the ideal, as the source prints it.
        memory_gb: of each device.
        stability: as the source prints it; none says how it is counted.
    """

    source: str
    hardware: str
    model: str
    mode: str
    precision: str
    batch: int | None
    samples_per_second: float
    latency_ms: float | None = None
    auc: float | None = None
    minutes: float | None = None
    times_cpu: float | None = None
    criterion: str = ""
    configuration: str = ""
    power_w: float | None = None
    scalability: float | None = None
    memory_gb: float | None = None
    stability: float | None = None

    @property
    def protocol(self) -> str:
        """The way of counting, by its name in :mod:`dlrm_studies.protocols.measure`.

        Papers count as facebook does.
        """
        return {NVIDIA: "nvidia", DEEPSPARK: "deepspark"}.get(self.source, "facebook")


NOT_SAID = "not said"
NVIDIA = (
    "NVIDIA DeepLearningExamples, TensorFlow2/Recommendation/DLRM_and_DCNv2/doc/DLRM.md (729963d)"
)
DEEPSPARK = "DeepSparkHub, recommendation/ctr/dlrm/pytorch/README.md (113dd2f)"
KALAMKAR = "Kalamkar et al. 2020 (arXiv:2005.04680)"


def _nvidia() -> Iterator[Published]:
    """Trainings and predictions of NVIDIA's page; a batch of 65,536 is shared by all GPUs."""
    full, dgx1, dgx2 = "FP32", "V100-32GB (DGX-1)", "V100-32GB (DGX-2)"
    # samples/s, AUC and minutes to train, in full and in mixed precision
    trained = (
        ("1 × A100-80GB", "small", "TF32", (2.84e6, 0.8025, 26.75), (4.55e6, 0.8025, 16.27)),
        ("8 × A100-80GB", "large", "TF32", (10.9e6, 0.8027, 8.77), (13.8e6, 0.8026, 6.57)),
        ("8 × A100-80GB", "extra large", "TF32", (9.76e6, 0.8026, 10.47), (11.5e6, 0.8026, 9.08)),
        (f"1 × {dgx1}", "small", full, (0.663e6, 0.8027, 109.63), (2.23e6, 0.8025, 34.83)),
        (f"8 × {dgx1}", "large", full, (3.13e6, 0.8028, 26.01), (6.31e6, 0.8026, 13.73)),
        (f"1 × {dgx2}", "small", full, (0.698e6, 0.8026, 105.13), (2.44e6, 0.8026, 33.37)),
        (f"8 × {dgx2}", "large", full, (3.79e6, 0.8027, 21.21), (7.82e6, 0.8027, 11.43)),
        (f"16 × {dgx2}", "large", full, (6.43e6, 0.8025, 15.52), (10.5e6, 0.8026, 10.88)),
    )
    for hardware, model, precision, *both in trained:
        for name, (rate, auc, minutes) in zip((precision, "mixed"), both, strict=True):
            # the comparison with CPUs names no precision: its 11.5 M are this row's
            times = 649.0 if (model, name) == ("extra large", "mixed") else None
            yield Published(
                *(NVIDIA, hardware, model, "training", name, 65536, rate),
                auc=auc,
                minutes=minutes,
                times_cpu=times,
            )
    for hardware, rate, times in (
        ("2 × EPYC 7742", 17.7e3, 1.0),
        ("1 × A100-80GB, 2 × EPYC 7742", 768e3, 43.0),
    ):
        run = (NVIDIA, hardware, "extra large", "training", NOT_SAID, None, rate)
        yield Published(*run, times_cpu=times)
    # samples/s and mean latency, in full and in mixed precision
    predicted = (
        ("1 × A100-80GB", "TF32", (1.38e6, 1.49), (1.48e6, 1.38)),
        (f"1 × {dgx1}", full, (0.871e6, 2.35), (0.951e6, 2.15)),
        ("1 × V100-16GB (DGX-2)", full, (1.15e6, 1.78), (1.37e6, 1.50)),
    )
    for hardware, precision, *pairs in predicted:
        for name, (rate, latency) in zip((precision, "mixed"), pairs, strict=True):
            yield Published(NVIDIA, hardware, "small", "inference", name, 2048, rate, latency)


PUBLISHED = (
    *_nvidia(),
    Published(DEEPSPARK, "1 × BI-V100", "DLRM", "training", NOT_SAID, 2048, 196_958),
    Published(DEEPSPARK, "8 × BI-V100", "DLRM", "training", NOT_SAID, None, 346_555, auc=0.75),
    Published(
        *(DEEPSPARK, "8 × BI-V100", "DLRM", "training", "mixed", None, 793_486),
        auc=0.75,
        criterion="AUC 0.75",
        configuration="SDK V2.2, batch 2,048, 8 cards, AMP",
        power_w=8 * 60.0,
        scalability=0.97,
        memory_gb=3.7,
        stability=1.0,
    ),
    # milliseconds an iteration: 2048 samples in 38 ms and in 62 ms
    Published(KALAMKAR, "1 CPU socket", "Small", "training", "FP32", 2048, 2048 / 0.038),
    Published(KALAMKAR, "1 × V100, Caffe2", "Small", "training", "FP32", 2048, 2048 / 0.062),
)
