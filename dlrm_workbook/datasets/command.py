"""``dlrm data``: the arguments of its actions, and what they do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dlrm_core.base.cli import listed_options
from dlrm_core.base.errors import InputError
from dlrm_core.base.files import plain
from dlrm_core.data.files.sources import FORMATS
from dlrm_core.data.files.teacher import Law, TeacherConfig, Variant
from dlrm_workbook.datasets.convert import Conversion, convert
from dlrm_workbook.datasets.criteo import TEXT_LAYOUTS, Request, preprocess
from dlrm_workbook.datasets.generate import VARIANTS, generate, scaled_variant
from dlrm_workbook.datasets.inspection import examine_data
from dlrm_workbook.datasets.splits import CONVERTED_LAYOUTS
from dlrm_workbook.datasets.variants import DOCUMENT_SAMPLES, variants
from dlrm_workbook.ground.machine import usable_cores

NVIDIA_SAMPLES = 32768 * 1024


CHOICES: dict[str, Iterable[str]] = {
    "--variant": [*VARIANTS, "custom"],
    "--labels": ("random", "teacher"),
    "--layout": TEXT_LAYOUTS,
    "--format": FORMATS,
    "--from": CONVERTED_LAYOUTS,
    "--to": CONVERTED_LAYOUTS,
    "--dense": ("counts", "features"),
}
"""What an option of ``options.csv`` may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (_, help_text) in ACTIONS.items():
        action = actions.add_parser(name, help=help_text)
        listed_options(action, __file__, name, CHOICES)


def data(arguments: argparse.Namespace) -> int:
    """Run the action; the last line of those that make a data set is its folder."""
    run, _ = ACTIONS[arguments.action]
    return run(arguments)


def _generate(arguments: argparse.Namespace) -> int:
    law = Law(_variant(arguments), _at_least("--seed", arguments.seed, 0), _teacher(arguments))
    samples = parse_samples(arguments.samples, arguments.scale)
    result = generate(law, samples, Path(arguments.output), _threads(arguments))
    counts = " and ".join(f"{n:,} {split}" for split, n in samples.items())
    rate = result.bytes_written_now / 1e6 / result.seconds
    print(
        f"{counts} samples, {result.bytes / 1e9:.3f} GB; {result.bytes_written_now / 1e9:.3f} GB "
        f"written in {result.seconds:.2f} s ({rate:.0f} MB/s)"
    )
    print(result.folder, flush=True)
    return 0


def _teacher(arguments: argparse.Namespace) -> TeacherConfig | None:
    if arguments.labels != "teacher":
        names = ("teacher_seed", "teacher_strength", "teacher_rows")
        _refuse_given(arguments, names, f"--labels teacher, not {arguments.labels}")
        return None
    given = {name: getattr(arguments, f"teacher_{name}") for name in ("seed", "strength", "rows")}
    teacher = TeacherConfig(**{name: value for name, value in given.items() if value is not None})
    if not 0.0 <= teacher.strength <= 8.0:
        raise InputError(f"--teacher-strength is {teacher.strength:g}, expected 0 to 8")
    _at_least("--teacher-seed", teacher.seed, 0)
    _at_least("--teacher-rows", teacher.rows, 1)
    return teacher


def _refuse_given(arguments: argparse.Namespace, names: Sequence[str], wanted: str) -> None:
    """Flags that would be ignored are refused."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} is for {wanted}")


def _variant(arguments: argparse.Namespace) -> Variant:
    if arguments.variant != "custom":
        names = ("table_rows", "dense_features", "alpha")
        _refuse_given(arguments, names, f"--variant custom, not {arguments.variant}")
        return scaled_variant(VARIANTS[arguments.variant], arguments.scale)
    if arguments.table_rows is None:
        raise InputError("--variant custom needs --table-rows, such as --table-rows 1000,50,3")
    try:
        rows = tuple(int(word) for word in arguments.table_rows.split(","))
    except ValueError:
        raise InputError(
            f"--table-rows is {arguments.table_rows!r}, expected numbers such as 1000,50,3"
        ) from None
    dense = 13 if arguments.dense_features is None else arguments.dense_features
    alpha = 1.45 if arguments.alpha is None else arguments.alpha
    _at_least("--dense-features", dense, 0)
    return scaled_variant(Variant("custom", dense, rows, alpha), arguments.scale)


def parse_samples(text: str | None, scale: float) -> dict[str, int]:
    """``TRAIN[/TEST]`` as numbers; TEST left out is an eighth. Refuses (InputError) other texts."""
    if text is None:
        train = max(1, round(NVIDIA_SAMPLES * scale))
        return {"train": train, "test": max(1, train // 8)}
    words = text.replace("_", "").split("/")
    try:
        numbers = [int(float(word)) for word in words]
    except (ValueError, OverflowError):
        numbers = []
    if not 1 <= len(numbers) <= 2 or min(numbers) < 1:
        raise InputError(f"--samples is {text!r}, expected TRAIN or TRAIN/TEST, such as 4e6/5e5")
    return {"train": numbers[0], "test": numbers[1] if numbers[1:] else max(1, numbers[0] // 8)}


def _preprocess(arguments: argparse.Namespace) -> int:
    request = Request(
        layout=arguments.layout,
        inputs=[Path(name) for name in arguments.input],
        threshold=arguments.frequency_threshold,
        max_rows=arguments.max_rows,
        test_fraction=arguments.test_fraction,
        threads=_threads(arguments),
        memory=_at_least("--memory-mb", arguments.memory_mb, 1) << 20,
    )
    result = preprocess(request, Path(arguments.output))
    counts = " and ".join(f"{n:,} {split}" for split, n in result.rows.items())
    rate = result.input_bytes / 1e6 / result.seconds
    print(
        f"{counts} samples, {sum(result.table_rows):,} embedding rows; "
        f"{result.input_bytes / 1e6:.0f} MB of text in {result.seconds:.2f} s ({rate:.0f} MB/s)"
    )
    print(result.folder, flush=True)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    counts = None if arguments.dense is None else arguments.dense == "counts"
    before, after = vars(arguments)["from"], arguments.to
    if counts is not None and before != "parquet":
        raise InputError(f"--dense is for --from parquet, not {before}")
    request = Conversion(Path(arguments.path), before, after, arguments.halve_test, counts)
    done = convert(request, Path(arguments.output))
    parts = ", ".join(f"{count:,} {name}" for name, count in done.samples.items())
    print(f"{parts} samples, {done.bytes / 1e9:.3f} GB, in {done.seconds:.2f} s")
    if done.law:
        print(done.law)
    if done.lost:
        print(
            f"{done.lost:,} of {done.values:,} numerical values lost digits: converted back they "
            "will differ"
        )
    print(done.folder, flush=True)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    report = examine_data(Path(arguments.path), arguments.format, arguments.verify)
    print(json.dumps(plain(report)) if arguments.json else as_text(report), flush=True)
    return 1 if report["problems"] else 0


def _variants(arguments: argparse.Namespace) -> int:
    share = arguments.measure
    if share is not None and not 0.0 < share <= 1.0:
        raise InputError(f"--measure is {share:g}, expected a number above 0 and at most 1")
    rows = variants(DOCUMENT_SAMPLES, share, Path(arguments.work), _threads(arguments))
    if arguments.json:
        print(json.dumps(plain(rows)), flush=True)
        return 0
    print("\n".join(_table([{name: _rounded(row[name]) for name in row} for row in rows])))
    print(
        f"  computed: rows, sizes, parameters, what training takes on one GPU; "
        f"{DOCUMENT_SAMPLES:,} samples are those of NVIDIA's document (65.5 M and 6.55 M)\n  "
        + (
            "measured on this machine: share_made, making_s, making_peak_mib; whole_s is "
            "making_s / share_made. Criteo's text was not at hand: its times are not measured"
            if share
            else "preparation time: not measured (--measure 0.01 does); NVIDIA's document says "
            "minutes for synthetic sets, hours for Criteo's text"
        ),
        flush=True,
    )
    return 0


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 10 or not value else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def as_text(report: dict[str, Any]) -> str:
    lines = [f"{report['path']}: {report['format']}"]
    for name, split in report["splits"].items():
        rate = "no" if split["click_rate"] is None else f"{split['click_rate']:.4f}"
        lines.append(
            f"\n{name}: {split['samples']:,} samples, {split['bytes'] / 1e6:,.1f} MB, "
            f"click rate {rate}"
        )
        for key in ("dense", "tables", "fields"):
            lines += _table(split.get(key, []))
    shown = {key: value for key, value in report["metadata"].items() if key != "teacher"}
    if shown:
        lines += ["\nmetadata:", *(f"  {key}: {value}" for key, value in shown.items())]
    lines += ["", *(f"PROBLEM  {problem}" for problem in report["problems"])]
    if not report["problems"]:
        lines.append("all values are in range, all files have the same number of samples")
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return [
        "  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in cells
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise InputError(f"{name} is {value}, expected at least {least}")
    return value


def _threads(arguments: argparse.Namespace) -> int:
    if arguments.threads is None:
        return usable_cores()
    return _at_least("--threads", arguments.threads, 1)


ACTIONS = {
    "generate": (_generate, "write a synthetic data set (NVIDIA's layout)"),
    "preprocess": (_preprocess, "convert Criteo's text (Kaggle, Terabyte)"),
    "inspect": (_inspect, "check every value of a data set"),
    "convert": (_convert, "write a data set in another layout, or as Parquet"),
    "variants": (_variants, "what each published data set takes: disk, memory, time"),
}
