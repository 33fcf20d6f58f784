"""What a measurement with HPCToolkit is told and what it returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlrm_core.config import ProfilingConfig


@dataclass(frozen=True)
class HPCToolkitSettings:
    """How to measure.

    Attributes:
        home: installation folder; "" means HPCTOOLKIT_HOME, then PATH.
        python_frames: put Python functions into call paths where offered; on a CPU
            in a pass of their own, since they cost time at every Python call.
        pc_sampling: on a GPU, a second pass for stall reasons.
        structure: run hpcstruct.
        structure_limit_mb: hpcstruct skips binaries above this, in millions of bytes.
        structure_cache: folder of structure files kept between measurements, or
            None for one in the user's cache folder.
        timeout_s: seconds for each run of the program.
        structure_timeout_s, database_timeout_s: seconds for hpcstruct, hpcprof.
        jobs: threads of hpcstruct and hpcprof; None: every processor allowed.
    """

    home: str = ""
    python_frames: bool = True
    pc_sampling: bool = True
    structure: bool = True
    structure_limit_mb: int = 64
    structure_cache: Path | None = None
    timeout_s: float = 3600.0
    structure_timeout_s: float = 1800.0
    database_timeout_s: float = 1800.0
    jobs: int | None = None

    @classmethod
    def from_config(cls, config: ProfilingConfig) -> HPCToolkitSettings:
        """The settings that a parameters file's ``profiling`` section asks for."""
        return cls(
            home=config.hpctoolkit_home,
            python_frames=config.python_frames,
            pc_sampling=config.pc_sampling,
            structure=config.structure,
            structure_limit_mb=config.structure_limit_mb,
            timeout_s=float(config.timeout_s),
        )


@dataclass(frozen=True)
class PassResult:
    """One profiled run and its database.

    Attributes:
        name: ``times``, ``frames`` or ``stalls``.
        command: hpcrun's argument list.
        events: the events that were measured.
        python_frames: call paths hold Python functions.
        ms_per_iteration: median that the workload reported while profiled.
        dilation: that divided by the unprofiled median; None if either is unknown.
        part_dilation: the same for each ``NAME_ms_per_iteration`` that the workload
            reports besides, by NAME. Python frames slow parts unequally: a loop of
            many small Python calls ran 5.8x slower where tensor work ran 1.5x.
        lost_samples: share of samples, and hence of time, that hpcrun dropped, 0 to 1;
            None if it did not say.
        exit_code: hpcrun's, which is the program's.
        measurements: hpcrun's directory.
        database: hpcprof's directory.
        result: the workload's final JSON object while profiled.
        notices: what the reader of the figures should know.
    """

    name: str
    command: tuple[str, ...]
    events: tuple[str, ...]
    python_frames: bool
    ms_per_iteration: float | None
    dilation: float | None
    part_dilation: dict[str, float]
    lost_samples: float | None
    exit_code: int
    measurements: Path
    database: Path
    result: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """Everything that one call of ``measure`` found.

    Attributes:
        unprofiled: the workload's final JSON object without HPCToolkit.
        passes: the profiled runs that succeeded; ``times`` always, first.
        not_measured: name of a measurement to the reason why it was not made.
        notices: about the whole measurement.
        version: HPCToolkit's version.
        logs: folder with each stage's standard output and error.
    """

    unprofiled: dict[str, Any]
    passes: tuple[PassResult, ...]
    not_measured: dict[str, str]
    notices: tuple[str, ...]
    version: str
    logs: Path

    def database(self, name: str = "times") -> Path | None:
        """The database of a pass, or None if that pass was not made."""
        return next((p.database for p in self.passes if p.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; paths as text."""
        return _plain(asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
