"""The sample that the package ships: a recording, made a profile and stripped of what is private.

    dlrm record -f parameters/seed.yaml -p profiling.iterations=12 --output RECORDING
    python benchmarks/sample.py RECORDING --date 2026-11-21

It replaces dlrm_workbook/samples/seed-cpu. Record on a quiet machine: the page opened on the
sample shows its counters, ceilings and probes.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import tempfile
from pathlib import Path

from dlrm_workbook.analysis.attribution import attribute, coverage
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_recording
from dlrm_workbook.samples import SAMPLE

PRIVATE = ("hostname", "/home/", "/work/", "/tmp/", "/root/")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args()
    profile = describe(read_recording(options.recording), options.date)
    with tempfile.TemporaryDirectory(dir=SAMPLE.parent) as place:
        made = profile.save(Path(place) / SAMPLE.name)
        text = (made / "profile.json").read_text(encoding="utf-8")
        found = [word for word in PRIVATE if word in text]
        if found:
            raise SystemExit(f"the recording names what is private: {', '.join(found)}")
        shutil.rmtree(SAMPLE, ignore_errors=True)
        made.rename(SAMPLE)
    size = sum(file.stat().st_size for file in SAMPLE.iterdir())
    covered = coverage(attribute(profile))
    print(f"{SAMPLE}: {size:,} bytes, {covered:.2%} of the step in named parts")


def describe(profile: Profile, date: str) -> Profile:
    """Say in ``meta["sample"]`` of what machine it is and when it was recorded."""
    machine = profile.meta["machine"]
    name = machine["cpu"].replace("(R)", "").replace("(TM)", "").replace(" Processor", "")
    article = "an" if name[:1] in "AEIO" else "a"
    profile.meta["engine_choice"] = "torch.profiler; HPCToolkit was not asked for"
    profile.meta["sample"] = (
        f"It was recorded on {date} with parameters/seed.yaml, {len(profile.iterations)} "
        f"iterations, on {machine['usable_cores']} cores of {article} {name} with "
        f"{machine['memory_gib']:.0f} GiB of memory, torch {profile.meta['versions']['torch']}, "
        "no GPU."
    )
    return profile


if __name__ == "__main__":
    main()
