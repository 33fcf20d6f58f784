"""``dlrm help``: what is described where it is defined, printed from there."""

import re
import runpy
from dataclasses import fields

import pytest

from dlrm_core.config import PRESETS, SECTIONS
from dlrm_workbook import cli, describe
from dlrm_workbook.analysis.devices import DEVICES
from dlrm_workbook.analysis.findings import RULES, gpu_idle
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.ground.vendors import SCRIPTS
from dlrm_workbook.help import TOPICS
from dlrm_workbook.show.views import VIEWS

NAMES = {
    "columns": ["gpu.kernel_table", "share_of_ceiling"],
    "commands": [f"dlrm {row.name}" for row in cli.SUBCOMMANDS],
    "findings": ["gpu_idle", "dense_gemm"],
    "flags": [flag.name for script in SCRIPTS for flag in script.flags],
    "gpus": [gpu.name for gpu in DEVICES],
    "parameters": [leaf.name for section in SECTIONS.values() for leaf in fields(section)],
    "report": list(VIEWS),
    "presets": [file.name for file in PRESETS.glob("*.yaml")],
}
"""Topic to names that it must describe."""


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_describes_every_name_by_itself(topic, capsys) -> None:
    assert f"| `{topic}` |" in describe().markdown
    whole = describe(topic).markdown
    for name in NAMES[topic]:
        assert f"`{name}`" in whole
        assert f"`{name}`" in describe(topic, name).markdown
    word = NAMES[topic][0].lstrip("-")
    assert cli.main(["help", topic, word]) == 0
    assert capsys.readouterr().out == f"{describe(topic, word)!r}\n"


def test_a_rule_is_described_by_what_it_looks_at_and_the_thresholds_that_it_uses() -> None:
    whole = describe("findings").markdown
    sections = re.split(r"^## ", whole, flags=re.MULTILINE)[1:]
    assert len(sections) == len(RULES)
    for section in sections:
        title, _, about = section.partition("\n\n")
        assert re.match(r"[A-Z][^.:]*[.:]", about), f"{title} has no docstring"
    assert f"`LAUNCH_SHARE` = {gpu_idle.LAUNCH_SHARE:g}: Least share of the step" in whole


def test_what_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "colums"]) == 2
    assert "no topic 'colums'; expected one of columns, " in capsys.readouterr().err
    assert cli.main(["help", "columns", "no_such"]) == 2
    assert "nothing of columns is called 'no_such'" in capsys.readouterr().err


def test_the_page_of_results_is_made_of_the_files_of_this_checkout() -> None:
    page = runpy.run_path(str(REPOSITORY / "benchmarks" / "page.py"))
    told = "docs/results.md is out of date: python benchmarks/page.py"
    assert page["PAGE"].read_text(encoding="utf-8") == page["page"](), told
