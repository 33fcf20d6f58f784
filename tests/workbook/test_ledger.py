"""A ledger: entries survive kill -9, the same work goes on, other work is refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_workbook.ground.ledger import Ledger, require_same

ADVICE = "give another --json"
SETTINGS = {"iterations": 20, "model": {"rows": (10, 20)}}


def open_ledger(path, work=SETTINGS, **options):
    return Ledger(
        path,
        {"settings": work, "cases": []},
        work=lambda document: document["settings"],
        entries="cases",
        key=("case", "threads"),
        advice=ADVICE,
        **options,
    )


def test_entries_are_in_the_file_at_once_and_found_again(tmp_path):
    path = tmp_path / "folder" / "result.json"
    ledger = open_ledger(path)
    assert not ledger.resumed and not path.exists() and ledger.find("small", 1) is None
    ledger.put({"case": "small", "threads": 1, "ms": 1.0})
    ledger.put({"case": "large", "threads": 1, "ms": 2.0})
    ledger.put({"case": "small", "threads": 1, "ms": 3.0})
    again = open_ledger(path)
    assert again.resumed and again.find("small", 1) == {"case": "small", "threads": 1, "ms": 3.0}
    assert [entry["case"] for entry in again.entries] == ["small", "large"]
    assert again.find("small", 2) is None
    assert json.loads(path.read_text())["cases"] == again.entries


def test_a_new_beginning_replaces_the_file_and_none_is_only_in_memory(tmp_path):
    path = tmp_path / "result.json"
    open_ledger(path).put({"case": "small", "threads": 1})
    assert open_ledger(path, {"iterations": 1}, resume=False).entries == []
    ledger = open_ledger(None)
    ledger.put({"case": "small", "threads": 1})
    assert ledger.find("small", 1) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({**SETTINGS, "iterations": 10}, "was begun with iterations 20, but now it is 10; give"),
        (
            {**SETTINGS, "model": {"rows": [10]}},
            r"was begun with model.rows \[10, 20\], but now it is \[10\]; give",
        ),
        ({**SETTINGS, "seed": 1}, "was begun without seed, but now it is 1; give"),
        ({"iterations": 20}, r"was begun with model {.*}, which is not given now; give"),
    ],
)
def test_other_work_is_refused_with_both_values(tmp_path, other, sentence):
    path = tmp_path / "result.json"
    open_ledger(path).put({"case": "small", "threads": 1})
    before = path.read_text()
    with pytest.raises(InputError, match=f"result.json {sentence} another --json$"):
        open_ledger(path, other)
    assert path.read_text() == before


@pytest.mark.parametrize(
    "text", ["[]", "3", "{}", '{"settings": {}}', '{"settings": 1, "cases": []}', "{"]
)
def test_a_file_of_something_else_is_refused_and_left(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"result\.json (is no document|cannot be read)"):
        open_ledger(path)
    assert path.read_text() == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
WORK = st.dictionaries(st.text(min_size=1, max_size=3), VALUES, max_size=4)


@settings(max_examples=40)
@given(WORK)
def test_work_is_the_same_after_a_way_through_a_file(tmp_path_factory, work):
    path = tmp_path_factory.mktemp("ledger") / "result.json"
    open_ledger(path, work).save()
    assert open_ledger(path, work).resumed


@given(WORK, st.text(min_size=1, max_size=3))
def test_one_different_leaf_is_found_wherever_it_lies(work, name):
    with pytest.raises(InputError, match="was begun with"):
        require_same("here", work | {name: "one"}, work | {name: "other"}, ADVICE)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2), st.booleans()), max_size=12))
def test_a_ledger_holds_what_a_mapping_would(tmp_path_factory, puts):
    path, mapping = tmp_path_factory.mktemp("ledger") / "result.json", {}
    ledger = open_ledger(path)
    for number, (case, threads, stopped) in enumerate(puts):
        entry = {"case": case, "threads": threads, "number": number}
        ledger.put(entry)
        mapping[case, threads] = entry
        if stopped:
            ledger = open_ledger(path)
    assert ledger.entries == list(mapping.values())
    assert all(ledger.find(*key) == entry for key, entry in mapping.items())


PUTS = """
import sys
from pathlib import Path
from test_ledger import open_ledger
ledger = open_ledger(Path(sys.argv[1]))
for number in range(10**6):
    if ledger.find("case", number) is None:
        ledger.put({"case": "case", "threads": number, "text": "x" * 1000})
        print(number, flush=True)
"""


def test_what_was_put_is_there_after_kill_9(tmp_path):
    path, random_moment, put = tmp_path / "result.json", random.Random(3), 0
    # the tests' folders, too, are on the child's path
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", PUTS, path], stdout=subprocess.PIPE, env=environment
        )
        assert process.stdout.readline() == b"%d\n" % put
        time.sleep(random_moment.uniform(0.0, 0.2))
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait()
        put = max([put, *map(int, said)]) + 1
        entries = open_ledger(path).entries
        assert [entry["threads"] for entry in entries] == list(range(len(entries)))
        # the last one may have been put and not said
        assert len(entries) in (put, put + 1)
        put = len(entries)
