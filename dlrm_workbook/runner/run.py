"""Runs notebooks: parameters in, a dated folder with notebook, page and run.json out.

papermill executes; :mod:`dlrm_workbook.runner.engine` stops what must be stopped,
:mod:`dlrm_workbook.ground.runs` keeps the folder honest, :mod:`dlrm_workbook.runner.pages` draws
the page.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json, write_text
from dlrm_core.base.settings import option_text
from dlrm_core.config import GivenSections, Parameters, load_parameters, parameters_from_sections
from dlrm_workbook.analysis.changes import apply_change
from dlrm_workbook.ground.processes import sigterm_as_exit
from dlrm_workbook.ground.runs import (
    DEFAULT_OUTPUT_ROOT,
    LATEST,
    NOTEBOOKS,
    RunError,
    RunFolder,
    claim_run_folder,
    named_run,
    runs_of,
)
from dlrm_workbook.ground.studies import require_study, study
from dlrm_workbook.ground.units import duration
from dlrm_workbook.recordings.command import require_program
from dlrm_workbook.recordings.open import require_recording
from dlrm_workbook.runner.index import list_runs
from dlrm_workbook.runner.parameters import (
    UNKNOWN_FILE,
    declared_parameters,
    explained_options,
    find_notebook,
    own_parameters,
    quiet_papermill,
    read_notebook,
    split_overrides,
    write_notebook,
)

CHAIN = ("train", "profile", "bottlenecks")
"""What ``all`` runs, in this order."""

PLACES = frozenset(
    {"profile_run", "train_run", "host_run", "other_run", "runs"}
    | {"record", "results", "against", "peer", "sweep_folder"}
)
"""Notebooks' own parameters that name files or folders, which must be there."""

MEASURED = {"record": ("scaling", "scaling.json"), "results": ("benchmark", "benchmark.json")}
"""Parameters that name a file that a notebook has measured: which notebook, which file."""

MAY_BE_EMPTY = frozenset({"host_run"})
"""Places that may be given empty: their notebook has a value of its own, and works without any."""

INPUT_ERRORS = ("InputError", "MissingToolError", "DatabaseError", "NoTraceError")


def run_notebooks(
    names: Sequence[str],
    parameters_file: str | os.PathLike[str] | GivenSections | None,
    overrides: Sequence[str] = (),
    output_root: str | os.PathLike[str] | None = None,
    *,
    cell_timeout: float | None = 7200.0,
    command: Sequence[str] | None = None,
    notebooks: Path | None = None,
) -> RunFolder:
    """Check everything for every notebook first, then execute them in order.

    A notebook that declares a parameter ``train_run`` or ``profile_run`` is given the
    folder of that run, if it is among the earlier ones, unless an override says otherwise.

    Args:
        names: of notebooks, without folder or suffix; :data:`CHAIN` is what ``all`` runs.
        parameters_file: YAML with the sections of :mod:`dlrm_core.config`, or sections in its
            place; None where the notebook explains a recording that is there (``profile_run``).
        overrides: ``section.leaf=value`` for the sections, ``name=value`` for the
            notebooks' own parameters.
        output_root: where dated folders go; None is
            :data:`~dlrm_workbook.ground.runs.DEFAULT_OUTPUT_ROOT`.
        cell_timeout: seconds after which a cell is ended; None or 0 is never.
        command: what the user typed, for run.json.
        notebooks: folder of the notebooks; None is :data:`~dlrm_workbook.ground.runs.NOTEBOOKS`.

    Returns:
        The last run folder, status ``finished``.

    Raises:
        InputError: bad parameters, no such notebook, unwritable output root;
            nothing has been run then.
        RunError: a cell failed or took too long, or the run was interrupted. The partial
            notebook, its page and run.json are kept, and later notebooks are not started.
    """
    if cell_timeout is not None and not 0 <= cell_timeout < float("inf"):
        raise InputError(f"--cell-timeout is {cell_timeout}, expected seconds, or 0 for never")
    for_sections, own = split_overrides(overrides)
    parameters = load_parameters(parameters_file, for_sections)
    plan = Plan.of(names, own, notebooks or NOTEBOOKS)
    root = Path(DEFAULT_OUTPUT_ROOT if output_root is None else output_root)
    plan.locate(root)
    typed_own = {key: value for values in plan.own.values() for key, value in values.items()}
    if parameters_file is not None:
        preset = parameters.preset
    elif parameters.profiling.command and not typed_own.get("profile_run"):
        preset = command_name(parameters.profiling.command)
    else:
        preset = recording_name(names, typed_own)
    plan.check(parameters)
    typed = shlex.join(as_typed(command or sys.argv, parameters.profiling.command))
    done: dict[str, RunFolder] = {}
    try:
        with closed_by_signals(done.values()):
            for number, name in enumerate(names, 1):
                earlier = {notebook: run.path for notebook, run in done.items()}
                given = plan.given(name, parameters, earlier)
                folder = claim_run_folder(root, name, preset, parameters=given, command=typed)
                done[name] = folder
                chain = (earlier or recorded_chain(given)) | {name: folder.path}
                folder.record["chain"] = relative_chain(chain, folder.path)
                head = f"{number}/{len(names)} {name}" if len(names) > 1 else name
                plan.execute(name, folder, given, cell_timeout, head)
                if len(names) > 1:
                    print(f"[{head}] finished in {duration(folder.elapsed())}", file=sys.stderr)
    except RunError as error:
        if error.code < 128:  # who interrupts does not wait for pages to be drawn again
            link_pages(done)
        raise
    link_pages(done)
    return folder


@contextlib.contextmanager
def closed_by_signals(runs: Collection[RunFolder]) -> Iterator[None]:
    """While the block lasts Ctrl-C and SIGTERM end it, and runs that go on are ``interrupted``.

    While a notebook runs its own watch takes the signals; this is for the moments between.
    """
    try:
        with sigterm_as_exit():
            yield
    except (KeyboardInterrupt, SystemExit) as signalled:
        name = "SIGTERM" if isinstance(signalled, SystemExit) else "SIGINT"
        for run in runs:
            if run.record["status"] == "running":
                with contextlib.suppress(InputError):
                    said = f"{run.notebook}.ipynb: interrupted by {name}"
                    run.close("interrupted", error=said)
        raise


def recorded_chain(given: Mapping[str, Any]) -> dict[str, Path]:
    """Runs that made what a notebook is given to explain, by notebook; empty where none did."""
    place = Path(str(given.get("profile_run") or "")).expanduser().absolute()
    try:
        record = json.loads((place / "run.json").read_text(encoding="utf-8"))
        chain = record.get("chain") or {record["notebook"]: "."}
        return {str(name): (place / folder).resolve() for name, folder in chain.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def relative_chain(chain: Mapping[str, Path], folder: Path) -> dict[str, str]:
    return {name: os.path.relpath(place, folder) for name, place in chain.items()}


def link_pages(done: Mapping[str, RunFolder]) -> None:
    """Make the earlier pages of a chain link to the later ones, which were not there before."""
    from dlrm_workbook.runner.pages import render_html

    paths = {name: folder.path for name, folder in done.items()}
    for folder in list(done.values())[:-1]:
        if not folder.ipynb.is_file():
            continue  # somebody removed the run meanwhile
        folder.record["chain"] = relative_chain(paths, folder.path)
        write_json(folder.path / "run.json", folder.record)
        render_html(folder.ipynb, folder.html, run=folder.record)


def as_typed(words: Sequence[str], command: Sequence[str]) -> list[str]:
    """The words of ``dlrm run``, a program's command behind ``--``, as it was typed."""
    is_given = words[-1].startswith("profiling.command=")
    return [*words[:-2], "--", *command] if is_given else [*words]


def command_name(command: Sequence[str]) -> str:
    """Name of the runs that measure a command without a parameters file: its script's."""
    scripts = (Path(word).stem for word in command if word.endswith((".py", ".sh")))
    name = next(scripts, Path(command[0]).name)
    return _folder_name(name) or "command"


def recording_name(names: Sequence[str], own: Mapping[str, Any]) -> str:
    """Name of the runs that show what is already measured without a parameters file: its file's.

    Raises:
        InputError: no recording or result is given, or a notebook measures: that needs parameters.
    """
    given = (own.get(key) for key in ("profile_run", "results", "sweep_folder", "record"))
    places = own.get("runs") or [next(filter(None, given), None)]
    if not all(places) or any(name in CHAIN[:2] for name in names):
        raise InputError(
            f"dlrm run {' '.join(names)} needs a parameters file (-f FILE); only what is "
            "already measured is shown without one (-p profile_run=PATH, -p 'runs=[PATH, PATH]' "
            "for compare, -p results=FILE for benchmark, -p record=FILE for scaling, "
            "-p sweep_folder=FOLDER for sweep)"
        )
    endings = re.compile(r"(\.(d|json|gz|tar|tgz|zip|trace|pt))+$")
    stems = [endings.sub("", Path(str(place)).name) for place in places]
    text = "-".join(stem[:30] for stem in stems) if len(stems) > 1 else stems[0]
    return _folder_name(text) or "recording"


def _folder_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text)[:60]


def measured_file(place: str, notebook: str, name: str, root: Path) -> str:
    """A file that a notebook has measured, given as itself, as its run's folder or as ``latest``.

    Raises:
        InputError: no finished run of the notebook in ``root`` has one.
    """
    if place != LATEST:
        inside = Path(place).expanduser() / name
        return str(inside) if inside.is_file() else place
    files = (run / name for run in runs_of(root, notebook))
    newest = next((file for file in files if file.is_file()), None)
    if newest is None:
        raise InputError(f"{LATEST}: no finished run of {notebook} in {root} has a {name}")
    return str(newest)


def located(key: str, place: str, root: Path) -> str:
    """The file or folder that a parameter of :data:`PLACES` names, also as ``latest``.

    Raises:
        InputError: there is none.
    """
    if place != LATEST and not is_there(place):
        raise InputError(f"{option_text(f'{key}={place}')}: there is no such file or folder")
    if key in MEASURED:
        return measured_file(place, *MEASURED[key], root)
    if key == "sweep_folder" and place == LATEST:
        # it brings pandas along, which no other run of this process needs
        from dlrm_workbook.trials.sweep.analyse import newest_sweep

        return str(newest_sweep(root))
    notebook = key.removesuffix("_run")
    return str(named_run(place, notebook if notebook in CHAIN else "profile", root))


def is_there(place: str) -> bool:
    """Whether a file or folder is there; not one whose name or user no system has."""
    try:
        return Path(place).expanduser().exists()
    except (OSError, RuntimeError):  # too long a name; no such user's folder
        return False


def said_of(parameters: Parameters) -> dict[str, Any]:
    """Sections with only what differs from the defaults: a recording has parameters of its own,
    and our defaults are none of them."""
    usual = parameters_from_sections({}).to_sections()
    return {
        name: {leaf: v for leaf, v in value.items() if v != usual[name][leaf]}
        if isinstance(value, dict)
        else value
        for name, value in parameters.to_sections().items()
    }


@dataclass(frozen=True)
class Plan:
    """Notebooks to run in order, each with the parameters of its own that were given."""

    paths: dict[str, Path]
    declared: dict[str, dict[str, dict[str, Any]]]
    own: dict[str, dict[str, Any]]

    @classmethod
    def of(
        cls, names: Sequence[str], own: Mapping[str, str], notebooks: Path | None = None
    ) -> Plan:
        """Find the notebooks and type their own parameters.

        Raises:
            InputError: no such notebook, or none of them takes a parameter.
            MissingToolError: a notebook's study is not installed.
        """
        for name in names:
            require_study(name)
        paths = {name: find_notebook(name, notebooks or NOTEBOOKS) for name in names}
        declared = {name: declared_parameters(path) for name, path in paths.items()}
        return cls(paths, declared, own_parameters(own, declared))

    def locate(self, root: Path) -> None:
        """Put run folders of an output root in place of ``latest``.

        Raises:
            InputError: what a parameter names is not there.
        """
        for own in self.own.values():
            for key in PLACES & own.keys():
                given = own[key] if isinstance(own[key], list) else [own[key]]
                if not all(given) and key not in MAY_BE_EMPTY:
                    raise InputError(
                        f"-p {key}= is empty, as of a shell's variable that is not set; expected "
                        "a file or folder (leave the parameter out to have the notebook's choice)"
                    )
                places = [located(key, str(place), root) for place in given if place]
                own[key] = places if isinstance(own[key], list) else "".join(places)

    def check(self, parameters: Parameters) -> None:
        """Refuse a ``change`` that these parameters cannot take, and a recording, record or
        benchmark that is none, before anything runs.

        Raises:
            InputError: naming the field that cannot have its value, or the file.
        """
        if "profile" in self.own:
            require_program(parameters.profiling)
        for own in self.own.values():
            for name in ("profile_run", "host_run"):
                if own.get(name):
                    require_recording(Path(own[name]).expanduser())
            if own.get("record"):
                study("scaling").read_record(Path(own["record"]).expanduser())
            if own.get("results"):
                study("benchmark").read_benchmark(Path(own["results"]).expanduser())
            if own.get("change"):
                apply_change(parameters, own["change"])

    def given(self, name: str, parameters: Parameters, done: Mapping[str, Path]) -> dict[str, Any]:
        """What a notebook is given: sections, its own parameters, folders of earlier runs."""
        sections = parameters.to_sections() if parameters.source else said_of(parameters)
        values = sections | self.own[name]
        for earlier, folder in done.items():
            values.setdefault(f"{earlier}_run", str(folder))
        return {key: value for key, value in values.items() if key in self.declared[name]}

    def execute(
        self,
        name: str,
        folder: RunFolder,
        given: dict[str, Any],
        cell_timeout: float | None,
        head: str = "",
    ) -> None:
        """Run a notebook in a folder claimed for it; status and page are left whatever happens.

        Lines of progress begin with ``head``, or the notebook's name.

        Raises:
            RunError: it did not finish.
        """
        import papermill

        from dlrm_workbook.runner.engine import ENGINE, Watch
        from dlrm_workbook.runner.progress import ProgressLine

        # what draws the page loads while the kernel starts and this process would only wait
        pages = "dlrm_workbook.runner.pages"
        threading.Thread(target=importlib.import_module, args=(pages,), daemon=True).start()
        notebook = self.paths[name]
        # a page links to the list, and the list names runs that go on
        list_runs(folder)
        if "output_folder" in self.declared[name]:
            given = given | {"output_folder": str(folder.path)}
        watch = Watch(cell_timeout)
        problem = ""
        with watch.signals():
            try:
                with contextlib.redirect_stdout(sys.stderr), quiet_papermill():
                    papermill.execute_notebook(
                        str(notebook),
                        str(folder.ipynb),
                        given,
                        engine_name=ENGINE,
                        kernel_name="python3",
                        progress_bar=False,
                        watch=watch,
                        progress=ProgressLine(head or name),
                    )
            except papermill.PapermillExecutionError:
                pass  # told below, from the notebook: the banner is papermill's, the words are ours
            except KeyboardInterrupt:
                watch.signum = watch.signum or signal.SIGINT
            except Exception as error:
                problem = f"the notebook could not be executed: {_last_line(error)}"
            try:
                _finish(folder, notebook, watch, problem)
            except KeyboardInterrupt:  # while the page was drawn
                number = watch.signum or signal.SIGINT
                said = f"{notebook.name}: interrupted by {signal.Signals(number).name}"
                folder.close("interrupted", error=said)
                raise RunError(f"{said}; kept: {folder.path}", folder, 128 + number) from None


def _finish(folder: RunFolder, notebook: Path, watch: Any, problem: str) -> None:
    """Status, page and message of a run that has ended in one way or another."""
    code, refused = 1, False
    has_failed = watch.failed is not None or watch.timed_out
    failing = failing_cell(folder.ipynb, watch.failed) if has_failed else None
    if watch.signum is not None:
        code = 128 + watch.signum
        problem = f"interrupted by {signal.Signals(watch.signum).name}"
        _mark_pending(folder.ipynb)
    elif watch.timed_out:
        problem = f"a cell took longer than {watch.cell_timeout:g} s (--cell-timeout)"
    elif failing:
        problem = failing["error"]
        kind, _, sentence = problem.partition(": ")
        code = 2 if kind in INPUT_ERRORS else 1
        if refused := kind in (*INPUT_ERRORS, "MeasurementError"):
            problem = sentence  # for readers, who need not know who refused, and where
    status = "interrupted" if watch.signum is not None else "failed" if problem else "finished"
    fields: dict[str, Any] = {"failing_cell": failing} if failing else {}
    if problem:
        fields["error"] = f"{notebook.name}: {problem}"
        if failing and not refused:
            fields["error"] += f" (at: {failing['first_line']})"
    fields |= recorded_notices(folder.path)
    folder.take_recorded_parameters()
    # the page shows the outcome; artifacts can be listed only once the page is there
    outcome = folder.record | fields | {"status": status, "seconds": folder.elapsed()}
    page_problem, summary = publish(folder, outcome)
    if page_problem and not problem:
        status, fields["error"] = "failed", f"{notebook.name}: {page_problem}"
    try:
        folder.close(status, **fields, **summary)
    except InputError as error:
        # run.json says "running" still; the next command sees that nobody runs there
        status, fields["error"] = "failed", fields.get("error", f"{notebook.name}: {error}")
    list_runs(folder)
    if status != "finished":
        raise RunError(f"{fields['error']}; kept: {folder.path}", folder, code)


def recorded_notices(folder: Path) -> dict[str, list[str]]:
    """``notices`` of what a notebook ran: fallbacks, and from which times ``auto`` chose what.

    Empty where the run's training or profile says none.
    """
    for name in ("result.json", "profile/profile.json"):
        with contextlib.suppress(InputError, AttributeError):
            document = read_json(folder / name)
            if said := document.get("meta", document).get("notices"):
                return {"notices": [str(notice) for notice in said]}
    return {}


def publish(folder: RunFolder, outcome: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Write verdict.md and the page.

    Returns:
        The reason if that was not possible, else an empty string; and what of the notebook's
        own words belongs into run.json.
    """
    from dlrm_workbook.runner.pages import render_html, run_facts
    from dlrm_workbook.runner.summary import summarise, verdict_markdown

    if not folder.ipynb.exists():
        return "no notebook was written", {}
    try:
        notebook = read_notebook(folder.ipynb)
        write_notebook(notebook, folder.ipynb)
        summary = summarise(notebook)
        files = (folder.html.name, folder.ipynb.name, "run.json")
        text = verdict_markdown(summary, outcome, run_facts(outcome), files)
        options = shlex.join(explained_options(outcome, folder.path)) or UNKNOWN_FILE
        write_text(folder.path / "verdict.md", text.replace(UNKNOWN_FILE, options))
        # who interrupts does not wait for figures to be drawn
        short = outcome["status"] == "interrupted"
        render_html(folder.ipynb, folder.html, run=outcome, short=short)
    except Exception as error:
        return f"the page could not be rendered: {_last_line(error)}", {}
    return "", summary.fields()


def failing_cell(ipynb: Path, executed_index: int | None) -> dict[str, Any] | None:
    """Which cell of the notebook's source failed: index (from 1), count, first line, error.

    The executed notebook holds cells of papermill's own (injected parameters, error
    banners), which do not count. None: no cell did, or nothing was written.
    """
    if not ipynb.exists():
        return None
    nb = read_notebook(ipynb)
    cells = [cell for cell in nb.cells if not _papermills_own(cell)]
    errors = [
        [output for output in cell.get("outputs", []) if output.output_type == "error"]
        for cell in cells
    ]
    index = next((index for index, raised in enumerate(errors) if raised), None)
    if index is not None:
        name, lines = errors[index][-1].ename, _lines(errors[index][-1].evalue)
        # what a user must mend is said first, with details below it
        place = 0 if name in INPUT_ERRORS else -1
        error = f"{name}: {lines[place]}" if lines else name
    elif executed_index is not None:
        before = sum(not _papermills_own(cell) for cell in nb.cells[:executed_index])
        index, error = min(before, len(cells) - 1), "the cell left no error message"
    else:
        return None
    first_line = next(iter(_lines(cells[index].source)), "")
    return {"index": index + 1, "of": len(cells), "first_line": first_line, "error": error}


def _papermills_own(cell: Any) -> bool:
    return not {"injected-parameters", "papermill-error-cell-tag"}.isdisjoint(
        cell.metadata.get("tags", [])
    )


def _mark_pending(ipynb: Path) -> None:
    """Say ``pending`` of cells that were never started; papermill calls them completed."""
    if not ipynb.exists():
        return
    nb = read_notebook(ipynb)
    for cell in nb.cells:
        state = cell.metadata.get("papermill", {})
        if state and not state.get("start_time"):
            state["status"] = "pending"
    with contextlib.suppress(InputError):  # the disk is full, and the notebook as it was
        write_notebook(nb, ipynb)


def _last_line(error: BaseException) -> str:
    lines = _lines(error)
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _lines(text: object) -> list[str]:
    """The lines of a text that are not blank, stripped."""
    return [line.strip() for line in str(text).splitlines() if line.strip()]
