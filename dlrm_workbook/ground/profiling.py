"""Parameters of a measurement: the section ``profiling``, which the core does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import called, coerce_section, read_yaml, setting, shown, with_meanings
from dlrm_workbook.ground.marks import parse_part

REMEDIES = (
    *("anomaly", "threads", "autocast", "sparse", "fused", "foreach", "onednn", "tf32", "ahead"),
    *("workers", "allocator", "other_allocator", "binding", "garbage_collection"),
    *("channels_last", "cudnn_benchmark", "pinned", "cuda_graphs", "compile"),
)
"""Remedies that can be tried on a running program, by the name that chooses them."""

GIVEN = "given"
"""``model_file``: the run's own parameters, which ``--like`` gives beside a recording."""

MEANINGS = read_yaml(Path(__file__).with_name("meanings.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
@with_meanings(MEANINGS["profiling"])
class ProfilingConfig:
    """How the run is measured; ``meanings.yaml`` says what each leaf means."""

    engine: str = setting("auto", choices=("auto", "torch", "hpctoolkit", "both"))
    warmup: int = setting(3, minimum=0)
    iterations: int = setting(20, minimum=1)
    record_shapes: bool = setting(True)
    profile_memory: bool = setting(True)
    with_stack: bool = setting(False)
    hpctoolkit_home: str = setting("")
    python_frames: bool = setting(True)
    pc_sampling: bool = setting(True)
    single_pass: bool = setting(False)
    gpu_control_flow: bool = setting(False)
    structure: bool = setting(True)
    structure_limit_mb: int = setting(16, minimum=1)
    command: tuple[str, ...] | None = setting(None)
    command_folder: str = setting("")
    parts: Mapping[str, str] = setting({})
    device_name: str = setting("")
    model_file: str = setting("")
    probes: bool = setting(True)
    trials: int = setting(60, minimum=0)
    remedies: tuple[str, ...] | None = setting(
        None,
        "the remedies that are tried, of " + ", ".join(REMEDIES) + "; null: all that the "
        "recording makes plausible (`dlrm run compare -p try=[...] -- COMMAND` sets it)",
    )
    timeout_s: int = setting(3600, minimum=1)

    @staticmethod
    def located(section: Mapping[str, Any], absolute: Callable[[str, str], str]) -> dict[str, str]:
        """The folder in which a program runs, where one is given: an absolute path."""
        folder = section.get("command_folder", "")
        if not section.get("command") or not isinstance(folder, str):
            return {}
        return {"command_folder": absolute("command_folder", folder or ".")}

    def __post_init__(self) -> None:
        coerce_section(self, "profiling")
        unknown = [name for name in self.remedies or () if name not in REMEDIES]
        if unknown:
            raise InputError(
                f"profiling.remedies: {shown(unknown[0])} is no remedy; expected some of "
                + ", ".join(REMEDIES)
            )
        for pattern, said in self.parts.items():
            try:
                parse_part(said)
            except ValueError as error:
                where = f"profiling.parts: {called(pattern)} is {shown(said)}"
                raise InputError(f"{where}, {error}") from None
