"""``dlrm protocols``: one run's figures by the protocols that others publish by."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dlrm_core.config import load_parameters
from dlrm_core.doctor import machine_facts
from dlrm_core.errors import InputError
from dlrm_core.evaluation_commands import batch_sizes, time_limit
from dlrm_core.files import plain, write_json
from dlrm_core.protocols import Measured, measure
from dlrm_core.run_folder import versions

SCHEMA = 1


def protocols(arguments: argparse.Namespace) -> int:
    """A line a figure, and with ``--json`` the record."""
    parameters = load_parameters(arguments.file, arguments.parameter)
    found = measure(
        parameters,
        arguments.iterations,
        batch_sizes(arguments.batch_sizes),
        arguments.steps,
        time_limit(arguments.seconds),
    )
    for notice in found.notices:
        print(notice, file=sys.stderr)
    print(as_text(found), flush=True)
    if arguments.json:
        write_json(Path(arguments.json), plain(document(found, parameters.to_sections())))
    return 0


def document(found: Measured, sections: dict[str, Any], command: str = "") -> dict[str, Any]:
    """The record, with what it was measured on."""
    return {
        "schema": SCHEMA,
        "command": command or " ".join(["dlrm", *sys.argv[1:]]),
        "title": sections.get("title", ""),
        "parameters": sections,
        "measured": found.to_json(),
        "machine": machine_facts(),
        "versions": versions(),
    }


def read_document(path: Path) -> dict[str, Any]:
    """A record of ``dlrm protocols --json``.

    Raises:
        InputError: the file is no such record.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["schema"] == SCHEMA:
            Measured(**tree["measured"])
            return dict(tree)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path}: is no record of dlrm protocols (schema {SCHEMA})")


def as_text(found: Measured) -> str:
    """For people."""
    lines = [f"{found.device}, {found.threads} threads, {found.precision}"]
    for one in found.training:
        data = "with data" if one["data_included"] else "without data"
        lines.append(
            f"training, {one['protocol']}: {one['samples_per_second']:,.0f} samples/s, "
            f"{one['ms_per_iteration']:.3f} ms/it {data} ({one['iterations']} iterations, "
            f"{one['left_out']} left out)"
        )
    for one in found.inference:
        lines.append(
            f"inference, {one['protocol']}, batch {one['batch_size']:,}: "
            f"{one['samples_per_second']:,.0f} samples/s, mean {one['mean']:.3f}, "
            f"p50 {one['p50']:.3f}, p90 {one['p90']:.3f}, p95 {one['p95']:.3f}, "
            f"p99 {one['p99']:.3f} ms ({one['steps']} steps, {one['warm_up_steps']} left out)"
        )
    if found.samples_per_joule is None:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.power["not_measured"].items())
        lines.append(f"power: not measured ({reasons})")
    else:
        lines.append(
            f"power: {found.power_w:,.1f} W, {found.samples_per_joule:,.1f} samples/s per watt"
        )
    for device, size in found.peak_memory_by_device.items():
        lines.append(f"peak memory, {device}: {size / 2**20:,.0f} MiB")
    return "\n".join(lines)
