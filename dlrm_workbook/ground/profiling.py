"""Parameters of a measurement: the section ``profiling``, which the core does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import called, coerce_section, setting, shown
from dlrm_workbook.ground.marks import parse_part

REMEDIES = (
    *("anomaly", "threads", "autocast", "sparse", "fused", "foreach", "onednn", "tf32", "ahead"),
    *("workers", "allocator", "other_allocator", "binding", "garbage_collection"),
    *("channels_last", "cudnn_benchmark", "pinned", "cuda_graphs", "compile"),
)
"""Remedies that can be tried on a running program, by the name that chooses them."""


@dataclass(frozen=True)
class ProfilingConfig:
    """How the run is measured."""

    engine: str = setting(
        "auto",
        "'torch': torch.profiler; 'hpctoolkit': hpcrun, hpcstruct, hpcprof; 'auto': HPCToolkit "
        "when hpcrun is found and works, else torch (the page says which), and torch for "
        "profiling.command, of which it explains more; 'both': HPCToolkit and then torch, side by "
        "side",
        choices=("auto", "torch", "hpctoolkit", "both"),
    )
    warmup: int = setting(3, "iterations before measuring", minimum=0)
    iterations: int = setting(20, "iterations measured", minimum=1)
    record_shapes: bool = setting(True, "torch: operator input shapes")
    profile_memory: bool = setting(True, "torch: allocations per operator")
    with_stack: bool = setting(False, "torch: Python call stacks (larger traces, more overhead)")
    hpctoolkit_home: str = setting(
        "", "folder of an HPCToolkit installation; empty: HPCTOOLKIT_HOME, then PATH"
    )
    python_frames: bool = setting(
        True,
        "HPCToolkit: Python frames in call paths (-a python) of passes that are not for times, "
        "where it offers them",
    )
    pc_sampling: bool = setting(
        True, "HPCToolkit on a GPU: a second pass with PC sampling for stall reasons"
    )
    single_pass: bool = setting(
        False,
        "HPCToolkit: everything in one run, hpcrun -a python -e CPUTIME -e gpu=nvidia,pc -t, as "
        "the experiment was measured: its times are not those of the program alone",
    )
    gpu_control_flow: bool = setting(
        False,
        "HPCToolkit: hpcstruct --gpucfg yes, for loops and calls in kernels (slow, needs nvdisasm)",
    )
    structure: bool = setting(
        True, "HPCToolkit: recover loops and inlining with hpcstruct before hpcprof"
    )
    structure_limit_mb: int = setting(
        64, "HPCToolkit: hpcstruct skips binaries larger than this (the page says so)", minimum=1
    )
    command: tuple[str, ...] | None = setting(
        None,
        "measure this program in place of the workbook's own training: its words, as "
        "[python, train.py, --epochs, '1'], run without a shell; it must step optimizers of torch",
    )
    command_folder: str = setting(
        "", "folder in which profiling.command runs; empty: where dlrm run is started"
    )
    parts: Mapping[str, str] = setting(
        {},
        "recordings of other programs: pattern of names (of ranges, modules, functions, operators "
        'or kernels) to their part, as {"*my_tower*": bottom_mlp, Pool: embedding backward}; '
        "goes before what the names say themselves",
    )
    device_name: str = setting(
        "",
        "recordings that name no GPU: which one it is, as its driver names it ('NVIDIA H100 80GB "
        "HBM3') or short (H100-SXM), so that its data sheet gives the limits",
    )
    model_file: str = setting(
        "",
        "recordings that name no shapes, as HPCToolkit's: the parameters file, or the preset, of "
        "the DLRM that they train, whose work gives the limits of its parts",
    )
    probes: bool = setting(
        True,
        "before measuring, time what this machine can do at best (products, bandwidth, random "
        "rows, launches) and what alternatives to each part take; false leaves both out",
    )
    trials: int = setting(
        60,
        "profiling.command with torch: seconds in which remedies are switched on and off in the "
        "running program after it was recorded; 0: none",
        minimum=0,
    )
    remedies: tuple[str, ...] | None = setting(
        None,
        "the remedies that are tried, of " + ", ".join(REMEDIES) + "; null: all that the "
        "recording makes plausible (`dlrm run compare -p try=[...] -- COMMAND` sets it)",
    )
    timeout_s: int = setting(3600, "seconds after which one measured run is ended", minimum=1)

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
