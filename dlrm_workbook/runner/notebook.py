"""What a notebook does besides showing: where its results go, which profile it explains.

``dlrm run`` claims the run folder and closes it. A notebook that is run by hand, in
JupyterLab or by plain papermill, has no folder: it claims a dated one itself and closes
it in its last cell, so that the next notebook finds its results in the same way.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_workbook.analysis.devices import device, name_device
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.ground.bar import Bar
from dlrm_workbook.ground.processes import Progress, ProgressCallback
from dlrm_workbook.ground.runs import (
    DEFAULT_OUTPUT_ROOT,
    RunFolder,
    claim_run_folder,
    latest_run,
    runs_of,
)
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.runner.by_hand import CellRecorder, publish_by_hand, recorder
from dlrm_workbook.runner.parameters import UNKNOWN_FILE, kept_options
from dlrm_workbook.samples import SAMPLE, sample_profile


@dataclass
class NotebookRun:
    """A notebook's validated parameters and the folder its results go to."""

    parameters: Parameters
    folder: Path
    output_root: Path
    claimed: RunFolder | None = None
    """The folder's run.json, if this notebook claimed the folder itself."""
    recorded: CellRecorder | None = None
    """What its cells show, where it claimed the folder and runs in a kernel."""

    def explains(self, source: Source) -> None:
        """Record in run.json what this notebook explains.

        It is recorded as ``profile_run`` (empty for the sample), beside the parameters that the
        recording says it was made with, and ``recording``: the device and machine it was made on.
        """
        meta = source.profile.meta
        explained = {**(meta.get("parameters") or {}), "profile_run": str(source.folder or "")}
        device = str(meta.get("device_name") or meta.get("device") or "")
        recording = {"device": device, "machine": meta.get("machine") or {}}
        run_json = self.folder / "run.json"
        if self.claimed is not None or run_json.is_file():
            folder = self.claimed or RunFolder(self.folder, read_json(run_json))
            folder.record_parameters(explained, recording)

    def finish(self) -> str:
        """Close a folder that this notebook claimed; a sentence that says where results are.

        Its notebook, page and verdict are there once the cell has ended.
        """
        claimed, recorded = self.claimed, self.recorded
        if claimed is not None and recorded is not None:
            recorded.at_end(lambda: publish_by_hand(claimed, recorded.cells))
        elif claimed is not None:
            claimed.close("finished")
        return f"Results are in {self.folder}"


def start(
    notebook: str, sections: Mapping[str, Any], output_folder: str = "", output_root: str = ""
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
    root, status = _root_and_status(given, output_root)
    # an executed notebook that is run again names the folder of its first run
    if given is None or status not in ("", "running"):
        claimed = claim_run_folder(
            root,
            notebook,
            "notebook",
            parameters=parameters.to_sections(),
            command=f"{notebook}.ipynb, run by hand",
        )
        return NotebookRun(parameters, claimed.path, root, claimed, recorder())
    try:
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output_folder {given} cannot be made: {error.strerror}") from None
    return NotebookRun(parameters, given, root)


def _root_and_status(given: Path | None, output_root: str) -> tuple[Path, str]:
    """The output root, and the status of the run that a folder is of; "" if it is of none."""
    status = ""
    if given is not None and (given / "run.json").is_file():
        run = read_json(given / "run.json")
        status = str(run.get("status", "")) if isinstance(run, dict) else ""
    if output_root:
        return Path(output_root).expanduser().absolute(), status
    return (given.parents[1] if given and status else DEFAULT_OUTPUT_ROOT), status


def recordings(output_folder: str = "", output_root: str = "") -> pd.DataFrame:
    """What :func:`load_profile` can open of an output root, whose runs are listed newest first.

    Args:
        output_folder: folder of a run in that root, as ``dlrm run`` gives it; or "".
        output_root: as for :func:`start`.

    Returns:
        ``run`` (name of the folder, or ``sample``), ``title``, ``preset``, ``started``,
        ``profile_run`` (str: what :func:`load_profile` takes). Finished profile runs, then
        the sample that ships with the package.
    """
    given = Path(output_folder).expanduser().absolute() if output_folder else None
    rows = []
    for folder in runs_of(_root_and_status(given, output_root)[0], "profile"):
        record = read_json(folder / "run.json")
        title = (record.get("parameters") or {}).get("title", "")
        rows.append((folder.name, title, record.get("preset"), record["started"], str(folder)))
    rows.append(("sample", "A recorded sample, not of this machine", "seed", "", str(SAMPLE)))
    return pd.DataFrame(rows, columns=["run", "title", "preset", "started", "profile_run"])


def load_profile(
    profile_run: str | Path = "",
    *,
    parts: Mapping[str, str] | None = None,
    output_root: str | Path = DEFAULT_OUTPUT_ROOT,
) -> Profile:
    """The profile of any run or recording, ready for ``attribute``.

    Its arguments are those of :func:`dlrm_workbook.explain`; ``meta["opened"]`` is a sentence that
    says what it is of.

    Raises:
        InputError: what is asked for cannot be opened, or holds no profile.
    """
    source = find_profile(str(profile_run), Path(output_root), parts)
    source.profile.meta["opened"] = source.sentence
    return source.profile


@dataclass(frozen=True)
class Source:
    """A profile to explain and where it came from; the recorded sample has no folder."""

    profile: Profile
    sentence: str
    folder: Path | None = None
    ranks: dict[int, Profile] = field(default_factory=dict)
    """Every rank's profile, where the recording holds several; ``profile`` is one of them."""

    @property
    def options(self) -> list[str]:
        """Options that name the parameters of the explained run on a command line: as they were
        typed for it, else those that it kept, else ``-f FILE``."""
        return (kept_options(self.folder) if self.folder else []) or UNKNOWN_FILE.split()

    def named(self, document: Any) -> Any:
        """JSON values whose sentences name the options of the explained run, where known."""
        if isinstance(document, Mapping):
            return {name: self.named(value) for name, value in document.items()}
        if isinstance(document, list):
            return [self.named(value) for value in document]
        if isinstance(document, str):
            return document.replace(UNKNOWN_FILE, shlex.join(self.options))
        return document


def find_profile(
    profile_run: str,
    output_root: Path,
    parts: Mapping[str, str] | None = None,
    device_name: str = "",
    model: str | Parameters = "",
) -> Source:
    """The profile asked for, else that of the newest finished run, else the recorded sample.

    Arguments and errors are those of :func:`dlrm_workbook.explain`.
    """
    if device_name:
        name_device({}, device_name)  # before a recording of gigabytes is read
    asked = profile_run not in ("", "latest")
    folder = Path(profile_run).expanduser().absolute() if asked else None
    # no full stop right after the path: where lines are short it would stand alone on the next
    sentence = f"The profile in `{folder}` is explained on this page."
    if folder is None:
        folder = latest_run(output_root, "profile")
        sentence = f"The newest finished profile run, `{folder}`, is explained on this page."
    if folder is not None:
        recording = open_recording(folder, parts)
        profile = recording.profile
        trained = load_parameters(model, []) if model and isinstance(model, str) else model
        like = trained.to_sections() if isinstance(trained, Parameters) else None
        for each in {id(p): p for p in (profile, *recording.ranks.values())}.values():
            if device_name:
                name_device(each.meta, device_name)
            if like and not each.meta.get("parameters"):  # a run of ours has its own
                each.meta["like"] = like
            if like and device_name:
                each.meta.setdefault("ceilings", device(each.meta["device_name"]).ceilings())
        if recording.cautions:
            profile.meta["cautions"] = recording.cautions + profile.meta.get("cautions", [])
        sentence = f"{sentence} {recording.sentence}".strip()
        title = (profile.meta.get("parameters") or {}).get("title", Parameters.title)
        if title != Parameters.title:
            sentence = f"**{in_markdown(title)}**\n\n{sentence}"
        return Source(profile, sentence, folder, recording.ranks)
    profile = sample_profile()
    return Source(
        profile,
        "**This page explains a recorded sample, not a run of this machine:** no finished "
        f"profile run was found in `{output_root}`. {profile.meta['sample']} Run the "
        "`profile` notebook to see your own machine.",
    )


@contextlib.contextmanager
def stage_bars(parameters: Parameters) -> Iterator[ProgressCallback]:
    """Live progress of a measurement: a bar a stage, with elapsed time and iterations.

    The block is given the ``progress`` of :func:`dlrm_workbook.recordings.measure.measure`.
    """
    config = parameters.profiling
    counted = config.warmup + config.iterations
    shown: tuple[str, int | None] = ("", None)
    bar: Bar | None = None

    def close() -> None:
        if bar is not None:
            # callbacks come a few times a second, so the last iterations may go unreported
            bar.fill(missing=2)
            bar.close()

    def show(progress: Progress) -> None:
        nonlocal shown, bar
        total = progress.of if progress.of != 1 else None
        if "hpcrun" in progress.stage or progress.stage == "unprofiled":
            total = counted  # reading binaries and databases counts nothing
        if bar is None or (progress.stage, total) != shown:
            close()
            shown = progress.stage, total
            looks: dict[str, Any] = {} if total else {"bar_format": "{desc}: {elapsed}{postfix}"}
            bar = Bar(progress.stage, "", total, **looks)
        bar.show(progress.iteration if total else None, progress.detail)

    try:
        yield show
    finally:
        close()
