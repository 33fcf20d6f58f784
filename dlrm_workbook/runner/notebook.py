"""What a notebook does besides showing: where its results go, which profile it explains.

``dlrm run`` claims the run folder and closes it. A notebook that is run by hand, in
JupyterLab or by plain papermill, has no folder: it claims a dated one itself and closes
it in its last cell, so that the next notebook finds its results in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.files import read_json
from dlrm_core.progress import Bar
from dlrm_workbook.processes import Progress
from dlrm_workbook.recordings.measure import saved_profile
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.runs import DEFAULT_OUTPUT_ROOT, RunFolder, claim_run_folder, latest_run
from dlrm_workbook.samples import sample_profile


@dataclass
class NotebookRun:
    """A notebook's validated parameters and the folder its results go to."""

    parameters: Parameters
    folder: Path
    output_root: Path
    claimed: RunFolder | None = None
    """The folder's run.json, if this notebook claimed the folder itself."""

    def finish(self) -> str:
        """Close a folder that this notebook claimed; a sentence that says where results are."""
        if self.claimed is not None:
            self.claimed.close("finished")
        return f"Results are in {self.folder}"


def start(
    notebook: str,
    sections: Mapping[str, Any],
    output_folder: str = "",
    output_root: str = "",
) -> NotebookRun:
    """Validate a notebook's parameters and make its folder.

    Args:
        notebook: its name, without suffix.
        sections: ``title``, ``model``, ``data``, ``training``, ``profiling``.
        output_folder: what ``dlrm run`` gives; empty, or the folder of a run that is
            over: a new dated folder, since no run is written over another.
        output_root: where dated folders are; empty: beside ``output_folder``, else
            ``outputs/`` of the repository.

    Raises:
        InputError: a parameter cannot work, or the folder cannot be made.
    """
    parameters = parameters_from_sections(sections)
    given = Path(output_folder).expanduser().absolute() if output_folder else None
    status = _status(given)
    if output_root:
        root = Path(output_root).expanduser().absolute()
    else:
        root = given.parents[1] if given and status else DEFAULT_OUTPUT_ROOT
    # an executed notebook that is run again names the folder of its first run
    if given is None or status not in ("", "running"):
        claimed = claim_run_folder(
            root,
            notebook,
            "notebook",
            parameters=parameters.to_sections(),
            command=f"{notebook}.ipynb, run by hand",
        )
        return NotebookRun(parameters, claimed.path, root, claimed)
    try:
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output_folder {given}: cannot be made: {error.strerror}") from None
    return NotebookRun(parameters, given, root)


def _status(folder: Path | None) -> str:
    """What run.json says of a run folder; empty where there is none."""
    if folder is None or not (folder / "run.json").is_file():
        return ""
    run = read_json(folder / "run.json")
    return str(run.get("status", "")) if isinstance(run, dict) else ""


@dataclass(frozen=True)
class Source:
    """A profile to explain and where it came from."""

    profile: Profile
    sentence: str
    folder: Path | None = None
    is_sample: bool = False

    def python_profile(self) -> Profile | None:
        """The pass with Python frames, if HPCToolkit made one for this run."""
        if self.folder is None or not (self.folder / "profile_python").is_dir():
            return None
        return Profile.load(self.folder / "profile_python")


def find_profile(profile_run: str, output_root: Path) -> Source:
    """The profile asked for, else that of the newest finished run, else the recorded sample.

    Raises:
        InputError: the folder asked for holds no profile.
    """
    if profile_run:
        folder = Path(profile_run).expanduser().absolute()
        sentence = f"This page explains the profile in `{folder}`."
        return Source(saved_profile(folder), sentence, folder)
    newest = latest_run(output_root, "profile")
    if newest is not None:
        sentence = f"This page explains the newest finished profile run, `{newest}`."
        return Source(saved_profile(newest), sentence, newest)
    profile = sample_profile()
    return Source(
        profile,
        "**This page explains a recorded sample, not a run of this machine:** no finished "
        f"profile run was found in `{output_root}`. {profile.meta['sample']} Run the "
        "`profile` notebook to see your own machine.",
        is_sample=True,
    )


class StageBars:
    """Live progress of a measurement: a bar a stage, with elapsed time and iterations.

    Use as the ``progress`` of :func:`dlrm_workbook.recordings.measure.measure`, in a ``with``.
    """

    def __init__(self, parameters: Parameters) -> None:
        config = parameters.profiling
        # the torch recorder runs as many iterations again before, without the profiler
        self._recorded = config.warmup + 2 * config.iterations
        self._measured = config.warmup + config.iterations
        self._stage = ""
        self._bar: Bar | None = None

    def __call__(self, progress: Progress) -> None:
        """Show where the measurement stands."""
        if self._bar is None or progress.stage != self._stage:
            self._bar = self._open(progress.stage)
        self._bar.show(progress.iteration, progress.detail or f"{progress.elapsed_s:.0f} s")

    def _open(self, stage: str) -> Bar:
        self._close()
        self._stage = stage
        if "torch" in stage:
            return Bar(stage, "iteration", self._recorded)
        if "hpcrun" in stage or stage == "unprofiled":
            return Bar(stage, "iteration", self._measured)
        # reading binaries and databases: nothing that is counted
        return Bar(stage, "iteration", bar_format="{desc}: {elapsed}{postfix}")

    def _close(self) -> None:
        if self._bar is not None:
            # callbacks come a few times a second, so the last iterations may go unreported
            self._bar.fill(missing=2)
            self._bar.close()
            self._bar = None

    def __enter__(self) -> StageBars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
