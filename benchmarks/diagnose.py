"""Whether headlines name the known causes of other people's recordings: right, partly or wrong.

    python benchmarks/diagnose.py FOLDER [--answers FILE] [--json FILE]

The file of answers has an entry for each recording, by its path below the folder (``A -> B`` for
what ``compare`` says of two): ``answer`` in words, ``says``, patterns that the headline must all
hold, and ``never``, patterns that it must not. A headline is right if it holds all and none of
``never``; partly right if the findings below it hold what it lacks, or it holds some; else wrong.
The recordings of ``labelled.yaml`` belong to others and are no part of this project.
"""

from __future__ import annotations

import argparse
import html
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json
from dlrm_workbook.ground.machine import machine_facts, versions
from dlrm_workbook.report import explain
from dlrm_workbook.trials.compare.comparison import RunsComparison
from dlrm_workbook.trials.compare.show import outcome_text

HERE = Path(__file__).parent
JUDGEMENTS = ("right", "partly", "wrong")


def headline(place: str, folder: Path) -> tuple[str, str]:
    """(headline, findings below it) of a recording, or what ``compare`` says of two."""
    if " -> " in place:
        runs = [str(folder / name) for name in place.split(" -> ")]
        with tempfile.TemporaryDirectory() as scratch:
            return outcome_text(RunsComparison(Path(scratch), runs)).markdown, ""
    report = explain(folder / place)
    below = (f"{finding.title}. {finding.evidence}" for finding in report.ranked_findings)
    return report.headline, "\n".join(below)


def judged(entry: Mapping[str, Any], head: str, below: str) -> str:
    """``right``, ``partly`` or ``wrong``."""

    def holds(pattern: str, text: str) -> bool:
        return re.search(pattern, text, re.IGNORECASE | re.DOTALL) is not None

    if any(holds(pattern, head) for pattern in entry.get("never", [])):
        return "wrong"
    said = [holds(pattern, head) for pattern in entry["says"]]
    if all(said):
        return "right"
    everywhere = all(holds(pattern, f"{head}\n{below}") for pattern in entry["says"])
    return "partly" if any(said) or everywhere else "wrong"


def trials(answers: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """What is said of each recording of the answers, with the judgement."""
    for place, entry in answers.items():
        began = time.perf_counter()
        try:
            head, below = (html.unescape(text) for text in headline(place, folder))
            judgement = judged(entry, head, below)
        except InputError as error:
            head, judgement = str(error).replace(f"{folder}/", ""), "wrong"
        yield {
            "recording": place,
            "judgement": judgement,
            "answer": entry["answer"],
            "headline": head,
            "seconds": round(time.perf_counter() - began, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answers", type=Path, default=HERE / "labelled.yaml")
    parser.add_argument("--json", default="", help="write the trials here")
    options = parser.parse_args()
    answers = yaml.safe_load(options.answers.read_text(encoding="utf-8"))
    names = dict.fromkeys(name for place in answers for name in place.split(" -> "))
    if missing := [name for name in names if not (options.folder / name).exists()]:
        parser.error(
            f"{options.folder} lacks {len(missing)} of the {len(names)} recordings that "
            f"{options.answers} has answers of: {', '.join(missing[:3])}"
        )
    rows = []
    for row in trials(answers, options.folder.resolve()):
        rows.append(row)
        print(f"{row['judgement']:7s} {row['recording']}  ({row['seconds']} s)")
        print(f"        answer: {row['answer']}\n        {row['headline']}", flush=True)
    counts = Counter(row["judgement"] for row in rows)
    tally = {judgement: counts[judgement] for judgement in JUDGEMENTS}
    print(", ".join(f"{count} {judgement}" for judgement, count in tally.items()))
    if options.json:
        facts = {"machine": machine_facts(), "versions": versions(), "tally": tally}
        write_json(Path(options.json), {**facts, "trials": rows})


if __name__ == "__main__":
    main()
