"""The one progress bar: what it counts, what it says, and that nothing depends on it."""

import json
import sys

import pytest
from small_training import parameters

from dlrm_core.train import train
from dlrm_workbook.evidence.training import MeteredRun
from dlrm_workbook.ground.bar import TOLD_TO, Bar


def test_texts_are_shown_and_those_that_end_something_are_counted(capsys) -> None:
    with Bar("in turns", "run", 3, counts=lambda text: text.startswith("step")) as bar:
        for text in ("step 1", "a note", "step 2"):
            bar(text)
    said = capsys.readouterr().err
    assert "in turns" in said and "2/3" in said and "step 2" in said


def test_a_bar_goes_on_and_never_beyond_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("training", "it", 10, done=4) as bar:
        bar.show(99, "99 s", "loading")
    said = capsys.readouterr().err
    assert "4/10" in said and "loading" in said and "10/10" in said and "99/10" not in said


@pytest.mark.parametrize(("missing", "shown"), [(None, "9/9"), (2, "9/9"), (1, "7/9")])
def test_only_a_bar_that_is_nearly_full_is_filled(missing, shown, capsys) -> None:
    with Bar("profiling", "iteration", 9) as bar:
        bar.show(7, "")
        bar.fill(missing)
    assert capsys.readouterr().err.rstrip().rpartition("\r")[2].count(shown) == 1


def test_what_is_not_shown_says_nothing(capsys, monkeypatch) -> None:
    def use(bar: Bar) -> None:
        with bar:
            bar("text")
            bar.add(3)
            bar.show(1, "text", "what")
            bar.fill()

    use(Bar("hidden", "run", 3, shown=False))
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    use(Bar("hidden", "run", 3))
    assert capsys.readouterr().err == "no progress bar: tqdm is not installed\n"


def test_a_bar_that_another_process_draws_says_where_it_is(tmp_path, capsys, monkeypatch) -> None:
    told = tmp_path / "bar.json"
    monkeypatch.setenv(TOLD_TO, str(told))
    monkeypatch.setattr("dlrm_workbook.ground.bar.TELL_SECONDS", 0.0)
    with Bar("training", "it", 10, done=4) as bar:
        bar.show(7, "loss 0.08")
        state = json.loads(told.read_text())
        assert (state["what"], state["done"], state["total"]) == ("training", 7, 10)
        assert (state["text"], state["first"]) == ("loss 0.08", 4)
        bar.show(8, "", "evaluating")
        assert json.loads(told.read_text())["what"] == "evaluating"
    assert not told.exists()
    assert capsys.readouterr().err == ""


def test_a_bar_goes_on_when_nobody_can_be_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(TOLD_TO, str(tmp_path / "gone" / "bar.json"))
    with Bar("training", "it", 10) as bar:
        bar.add(3)


def test_a_training_shows_its_figures_behind_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    train(parameters(max_steps=4), observer=MeteredRun(prints=True))
    printed = capsys.readouterr()
    assert "training" in printed.err and "4/" in printed.err and "samples/s" in printed.err
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert lines[-1]["iteration"] == 4
    assert f"loss {lines[-1]['loss']:.6f}" in printed.err
