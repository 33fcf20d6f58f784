"""Plants scripts in every text of recordings and parameters, and counts how many run.

Each recording in ``shared`` is written again with a payload behind every name that it holds:
of functions, modules, files, operators, kernels, ranges and threads, in its title, and in
parameters, preset and file name. Every notebook that explains recordings, and those that
measure, are run on them; each page, the list of all runs, each verdict.md as a careless viewer
shows it, and each executed notebook in JupyterLab, untrusted and trusted, is opened in a browser,
scrolled, hovered and clicked. A payload that runs counts itself; one that only the page's policy
stopped is counted as tried.

    python -m tests.campaigns.injection --folder /tmp/injection --json FILE
"""

import argparse
import gzip
import json
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mistune
import nbformat
from nbformat.sign import NotebookNotary

from dlrm_core.base.files import write_json
from dlrm_workbook.recordings.hpctoolkit import format as f4
from tests.browser import jupyter_lab, open_page
from tests.sample_notebooks import PAYLOADS

SHARED = Path(__file__).resolve().parents[3] / "shared"
NAMED = frozenset({"name", "kernel", "Collective name", "Process Group Name"})
"""Keys of a trace whose texts are names."""

RUN = "top.planted=(top.planted||0)+1"
"""What a payload does: it counts itself."""


def poisoned(text: str, number: int) -> str:
    """A text with a payload behind it."""
    return f"{text} {PAYLOADS[number % len(PAYLOADS)].replace('RUN', RUN)}"


def poison_trace(document: Any) -> Any:
    """A trace in which every name of an event, and every text of its arguments, is poisoned."""
    known: dict[str, str] = {}

    def changed(text: str) -> str:
        return known.setdefault(text, poisoned(text, len(known)))

    for event in document["traceEvents"]:
        if event.get("ph") == "M":
            event["args"] = {k: changed(v) if isinstance(v, str) else v
                             for k, v in event.get("args", {}).items()}  # fmt: skip
        elif not str(event.get("name", "")).startswith("ProfilerStep#"):
            event["name"] = changed(str(event.get("name", "")))
        args = event.get("args")
        if isinstance(args, dict):
            event["args"] = {k: changed(v) if k in NAMED and isinstance(v, str) else v
                             for k, v in args.items()}  # fmt: skip
    for device in document.get("deviceProperties", []):
        if "name" in device:
            device["name"] = changed(str(device["name"]))
    return document


def poison_database(source: Path, target: Path) -> Path:
    """A database in which every function, module and file, and the title, is poisoned.

    The texts are appended to ``meta.db``, before its footer, and the pointers lead to them.
    """
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    path = target / "meta.db"
    file = f4.DatabaseFile(path, "meta", b"_meta.db", ("General", "IdNames", "Metrics", "Context",
                           "Strings", "Modules", "Files", "Functions"))  # fmt: skip
    data, number = bytearray(path.read_bytes())[: -f4.FOOTER_BYTES], 0
    pointers = [file.sections["General"].start]
    for section, record, leaf in (
        ("Modules", "load module", "path"),
        ("Files", "source file", "path"),
        ("Functions", "function", "name"),
    ):
        head, _ = file.items(section, "list", record)
        at = head["items"] + f4.RECORDS[record].fields[leaf][1]
        pointers += [at + row * head["stride"] for row in range(head["count"])]
    for at in pointers:
        (text,) = struct.unpack_from("<Q", data, at)
        # <gpu kernel> and its like tell what a context is
        if text and not file.string(text, "text").startswith("<gpu"):
            struct.pack_into("<Q", data, at, len(data))
            data += poisoned(file.string(text, "text"), number).encode() + b"\0"
            number += 1
    path.write_bytes(bytes(data) + b"\0" * (-len(data) % 8) + b"_meta.db")
    return target


def _read_trace(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()).decode(errors="replace"), strict=False)


def make_recordings(folder: Path) -> dict[str, Path]:
    """Poisoned copies of all recordings that are here, by name."""
    made: dict[str, Path] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((SHARED / "recordings" / "traces").glob("*.json.gz")):
        made[path.name.split(".")[0]] = target = folder / f"{poisoned_file(path)}.json"
        target.write_text(json.dumps(poison_trace(_read_trace(path))))
    for path in sorted((SHARED / "recordings" / "traces").glob("*.tar.gz")):
        made[path.name.split(".")[0]] = several = folder / poisoned_file(path)
        several.mkdir(exist_ok=True)
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isreg() and ".json" in member.name:
                    opened = archive.extractfile(member)
                    assert opened is not None
                    data = opened.read()
                    if member.name.endswith(".gz"):
                        data = gzip.decompress(data)
                    name = Path(member.name).name.split(".")[0]
                    trace = poison_trace(json.loads(data, strict=False))
                    (several / f"{name}.json").write_text(json.dumps(trace))
    for path in sorted(SHARED.glob("*/*.d")):
        made[path.stem] = poison_database(path, folder / f"{poisoned_file(path)}.d")
    return made


def poisoned_file(path: Path) -> str:
    """A file's name that is a payload; a slash cannot be in it."""
    return f"{path.name.split('.')[0]} <img src=x onerror={RUN}> `x` **b** [a](javascript:{RUN})"


@dataclass
class Opened:
    """What one page or notebook did while it was open."""

    name: str
    where: str
    ran: int
    """Payloads that ran."""
    tried: list[str] = field(default_factory=list)
    """What a content security policy had to stop."""
    lures: list[str] = field(default_factory=list)
    """Links that run a script when they are followed; one to an https address is none."""


HOVER = """
() => [...document.querySelectorAll('.js-plotly-plot')].forEach((plot) => {
  for (const layer of plot.querySelectorAll('.nsewdrag, .slice, path.surface')) {
    const box = layer.getBoundingClientRect();
    for (const part of [0.1, 0.3, 0.5, 0.7, 0.9])
      layer.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, view: window,
        clientX: box.left + part * box.width, clientY: box.top + part * box.height}));
  }
})
"""
EVENTS = """
() => [...document.querySelectorAll('main *, .jp-OutputArea *')].slice(0, 60000).forEach((e) => {
  for (const kind of ['mouseover', 'focus', 'toggle', 'error', 'load'])
    e.dispatchEvent(new Event(kind));
})
"""
LURES = """
() => [...document.querySelectorAll('main a, .jp-OutputArea a')]
  .map((a) => a.getAttribute('href') || a.getAttribute('xlink:href') || '')
  .filter((to) => /^\\s*(javascript|data|vbscript)/i.test(to))
"""


def observe(page: Any, name: str, where: str, errors: list[str]) -> Opened:
    """Touch everything on an open page and count what ran."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for top in range(0, height, 3000):
        page.evaluate(f"window.scrollTo(0, {top})")
        page.wait_for_timeout(100)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    page.evaluate(HOVER)
    page.evaluate(EVENTS)
    page.wait_for_timeout(500)
    return Opened(
        name,
        where,
        int(page.evaluate("top.planted || 0")),
        [text for text in errors if "Content Security Policy" in text],
        page.evaluate(LURES),
    )


def open_html(html: Path) -> Opened:
    """A page, opened from disk with the network off."""
    with open_page(html.as_uri()) as (page, seen):
        page.wait_for_timeout(1500)
        return observe(page, f"{html.parent.name}/{html.name}", "page", seen.console_errors)


def open_in_lab(notebooks: list[Path], folder: Path, trusted: bool) -> Iterator[Opened]:
    """Executed notebooks in JupyterLab, each in turn; trusted ones are signed first."""
    where = "JupyterLab, trusted" if trusted else "JupyterLab, untrusted"
    with jupyter_lab(folder) as (address, token, root):
        for number, notebook in enumerate(notebooks):
            node = nbformat.read(notebook, as_version=4)
            name = f"n{number}.ipynb"
            nbformat.write(node, root / name)
            notary = NotebookNotary()
            signed = nbformat.read(root / name, as_version=4)
            (notary.sign if trusted else notary.unsign)(signed)
            url = f"{address}/lab/tree/{name}?token={token}"
            size = {"width": 1400, "height": 30_000}
            with open_page(url, address, viewport=size) as (page, seen):
                page.wait_for_selector(".jp-Notebook .jp-Cell", state="attached", timeout=60_000)
                page.wait_for_timeout(6000)
                yield observe(page, notebook.parent.name, where, seen.console_errors)


def runs(made: dict[str, Path], parameters: Path, sweep: Path) -> Iterator[tuple[str, list[str]]]:
    """Arguments of ``dlrm run`` for every notebook, on every recording that it takes."""
    gpu = [str(made[n]) for n in ("meta-dlrm-a100x8-rank3", "torchrec-cuda-graphs-a100x16-rank0")]
    yield "compare", ["-p", f"runs={json.dumps(gpu)}"]
    yield "explore", ["-p", f"other_run={gpu[1]}", "-p", f"profile_run={gpu[0]}"]
    yield "explore", ["-p", f"profile_run={made['dlrm-h100-pc']}"]
    both = [f"profile_run={made['dlrm-h100-pc']}", f"host_run={made['dlrm-h100-host']}"]
    yield "experiment", ["-p", both[0], "-p", both[1], "-p", f"title={poisoned('t', 3)}"]
    yield "profile", ["-f", str(sweep)]  # leads to the page of the sweep notebook
    for name in ("train", "profile", "scaling"):
        yield name, ["-f", str(parameters)]
    short = ["rounds=1", "iterations=2", "protocols=0", "batch_sizes=[64]"]
    yield "benchmark", ["-f", str(parameters), *(part for one in short for part in ("-p", one))]
    for path in made.values():
        yield "bottlenecks", ["-f", str(parameters), "-p", f"profile_run={path}"]


def execute(made: dict[str, Path], folder: Path, tell: Callable[[str], None]) -> list[Path]:
    """Run every notebook; the folders, of runs that failed on their input too."""
    parameters = folder / f"p {poisoned_file(Path('q'))}.yaml"
    sweep = folder / f"s {poisoned_file(Path('q'))}.yaml"
    quick = (Path(__file__).parents[2] / "parameters" / "quick.yaml").read_text()
    lines = [line for line in quick.splitlines() if not line.startswith("title:")]
    title = json.dumps(" ".join(poisoned("T", number) for number in range(len(PAYLOADS))))
    parameters.write_text("\n".join([f"title: {title}", *lines, ""]))
    sweep.write_text(f"{parameters.read_text()}\nsweep: {{training.batch_size: [256, 512]}}\n")
    out = folder / "out"
    for notebook, arguments in runs(made, parameters, sweep):
        command = [sys.executable, "-m", "dlrm_workbook", "run", notebook, *arguments]
        done = subprocess.run(
            [*command, "--output-root", str(out)], capture_output=True, text=True, check=False
        )
        tell(f"{notebook} {arguments[-1][:100]}: exit {done.returncode} {done.stderr[-300:]}")
    return sorted(path.parent for path in out.glob("*/*/run.json"))


def rendered_verdicts(folders: list[Path], target: Path) -> Iterator[Path]:
    """Pages of every ``verdict.md``, by a viewer that lets all HTML through and has no policy."""
    target.mkdir(exist_ok=True)
    for number, verdict in enumerate(folder / "verdict.md" for folder in folders):
        if verdict.is_file():
            html = target / f"verdict {number}.html"
            text = mistune.create_markdown(escape=False, plugins=["table", "strikethrough"])
            html.write_text(f"<meta charset=utf-8><main>{text(verdict.read_text())}</main>")
            yield html


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where runs go")
    parser.add_argument("--json", type=Path, help="write the tally here")
    parser.add_argument("--only", choices=("pages", "lab"), help="the runs are there already")
    options = parser.parse_args()
    out = options.folder / "out"
    if options.only is None:
        made = make_recordings(options.folder / "recordings")
        execute(made, options.folder, lambda text: print(text, flush=True))
    folders = sorted(path.parent for path in out.glob("*/*/run.json"))
    opened: list[Opened] = []

    def note(one: Opened) -> None:
        opened.append(one)
        print(one.where, one.name[:60], one.ran, one.tried[:1], one.lures[:2], flush=True)

    if options.only != "lab":
        for html in (html for folder in folders for html in folder.glob("*.html")):
            note(open_html(html))
        for html in [out / "index.html", *rendered_verdicts(folders, options.folder / "verdicts")]:
            note(open_html(html))
    if options.only != "pages":
        notebooks = [book for folder in folders for book in folder.glob("*.ipynb")]
        for trusted in (False, True):
            for one in open_in_lab(notebooks, options.folder / f"lab-{trusted}", trusted):
                note(one)
    tally = {
        "payloads": len(PAYLOADS),
        "opened": len(opened),
        "ran": sum(one.ran for one in opened),
        "stopped_by_policy": sum(len(one.tried) for one in opened),
        "lures": sum(len(one.lures) for one in opened),
    }
    print(json.dumps(tally))
    if options.json:
        write_json(options.json, tally | {"each": [asdict(one) for one in opened]})
    return 1 if tally["ran"] or tally["stopped_by_policy"] or tally["lures"] else 0


if __name__ == "__main__":
    sys.exit(main())
