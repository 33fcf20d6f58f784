"""Checkpoints: training goes on to the same bits, whatever is killed or changed."""

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from observers import Calling
from optional_tools import needs_fbgemm
from small_training import learned, parameters, same_bits, stored, trained, whole_checkpoint

from dlrm_core.base.errors import InputError
from dlrm_core.run.checkpoint import (
    WEIGHTS,
    CheckpointFolder,
    find_checkpoint,
    read_checkpoint,
    steps_in,
)
from dlrm_core.train import Trainer, train
from dlrm_workbook.cli import main

DCN = {"interaction": "dcn", "dcn_layers": 2, "dcn_rank": 3}

SCHEDULE = {
    "lr_warmup_steps": 3,
    "lr_decay_start": 5,
    "lr_decay_steps": 5,
    "learning_rate": 0.3,
    "lr_end": 0.01,
}


@pytest.mark.parametrize(
    ("data", "training"),
    [
        ({}, {}),
        ({"loader": "prefetch", "prefetch_batches": 3}, {"embedding_backend": "fused"}),
        ({"generator": "facebook_loop"}, {"optimizer": "adagrad"} | SCHEDULE),
        ({"generator": "uniform", "loader": "prefetch"}, {"optimizer": "adam"} | SCHEDULE),
        ({"generator": "zipf"}, {"optimizer": "adam", "fused_optimizer": True}),
        ({"generator": "zipf"}, {"optimizer": "rowwise_adagrad", "embedding_backend": "fused"}),
        ({"generator": "teacher"}, {"optimizer": "adagrad", "embedding_backend": "fused"}),
        ({"loader": "prefetch"}, {"optimizer": "rowwise_adagrad", "precision": "bf16"}),
        pytest.param({}, {"embedding_backend": "fbgemm"} | SCHEDULE, marks=needs_fbgemm),
        pytest.param(
            {"generator": "zipf"},
            {"optimizer": "adagrad", "embedding_backend": "fbgemm"},
            marks=needs_fbgemm,
        ),
        pytest.param(
            {"loader": "prefetch"},
            {"optimizer": "rowwise_adagrad", "embedding_backend": "fbgemm"},
            marks=needs_fbgemm,
        ),
        # a scale that skips some steps, so that their number is part of the state
        ({}, {"precision": "fp16", "loss_scale": 2.0**24, "optimizer": "adagrad"}),
        ({}, {"optimizer": "adagrad", "model": DCN}),
        ({}, {"optimizer": "adagrad", "model": {"interaction": "wukong", "wukong_fmb": 3}}),
        ({}, {"model": {"embedding_precision": "bf16"}}),
        ({}, {"model": {"embedding_precision": "fp16"}, "optimizer": "rowwise_adagrad"}),
        ({}, {"model": {"embedding_precision": "fp16"}, "embedding_backend": "fused"}),
        *(
            ({}, {"model": {"embedding_precision": "bf16"}, "embedding_backend": "fused"} | kind)
            for kind in ({"optimizer": "adagrad"}, {"optimizer": "rowwise_adagrad"})
        ),
        ({}, {"optimizer": "adam", "model": DCN, "precision": "fp16", "loss_scale": 2.0**24}),
    ],
)
def test_resuming_gives_the_same_bits(tmp_path, data, training):
    whole, weights, counts = trained(parameters(data, **training))
    first = parameters(data, **training, max_steps=7, checkpoint_every=3)
    before, _, _ = trained(first, tmp_path)
    assert steps_in(tmp_path) == [6, 7]
    for step in (6, 7):
        checkpoint = read_checkpoint(tmp_path / f"step-{step:08d}")
        after, resumed, resumed_counts = trained(parameters(data, **training), None, checkpoint)
        assert after.first_iteration == step and after.iterations == 12 - step
        assert before.losses[:step] + after.losses == whole.losses
        assert same_bits(resumed, weights) and resumed_counts == counts
        # skipped steps of fp16 are counted on, not anew
        skipped = [notice for notice in whole.notices if "steps were skipped" in notice]
        assert [notice for notice in after.notices if "steps were skipped" in notice] == skipped
        assert bool(skipped) == (training.get("precision") == "fp16")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize(
    ("dim", "saved", "loaded"),
    [
        *((dim, *pair) for dim in (1, 4) for pair in (("torch", "fused"), ("fused", "torch"))),
        *(
            # FBGEMM takes rows of multiples of 4 alone
            pytest.param(4, *pair, marks=needs_fbgemm)
            for other in ("torch", "fused")
            for pair in (("fbgemm", other), (other, "fbgemm"))
        ),
    ],
)
def test_back_ends_take_each_others_checkpoints(tmp_path, optimizer, dim, saved, loaded):
    model = {"embedding_dim": dim, "bottom_mlp": f"5-{dim}"}
    options = {"optimizer": optimizer, "learning_rate": 0.1}
    chosen = parameters(model=model, embedding_backend=saved, max_steps=5, **options)
    _, weights, _ = trained(chosen, tmp_path)
    checkpoint = read_checkpoint(find_checkpoint(str(tmp_path)))
    other = parameters(model=model, embedding_backend=loaded, **options)
    trainer = Trainer(other, checkpoint, tmp_path / "second")
    taken, _ = learned(trainer)
    assert same_bits(taken, weights)
    assert any(f"'{saved}' → '{loaded}'" in notice for notice in trainer.notices)
    after = trainer.train()
    straight, _, _ = trained(parameters(model=model, embedding_backend=saved, **options))
    # the back ends add up in different orders: a few roundings of losses below 1
    assert after.losses == pytest.approx(straight.losses[5:], rel=1e-4)
    # and the first takes the second's, whatever each of them counts
    ended, _ = learned(trainer)
    trainer.save()
    trainer.close()
    back = parameters(model=model, embedding_backend=saved, **options)
    taken, _ = learned(Trainer(back, read_checkpoint(find_checkpoint(str(tmp_path / "second")))))
    assert same_bits(taken, ended)


def test_auto_goes_on_with_the_back_end_that_began(tmp_path):
    trained(parameters(embedding_backend="fused", max_steps=3), tmp_path)
    checkpoint = read_checkpoint(find_checkpoint(str(tmp_path)))
    trainer = Trainer(parameters(embedding_backend="auto"), checkpoint)
    assert trainer.parameters.training.embedding_backend == "fused"


# ---- the folder -------------------------------------------------------------------


def test_old_checkpoints_go_once_newer_ones_are_whole(tmp_path):
    chosen = parameters(checkpoint_every=2, keep_checkpoints=3, checkpoint_folder=str(tmp_path))
    seen = []
    result = train(chosen, observer=Calling(seen.append))
    assert steps_in(tmp_path) == [8, 10, 12]
    assert result.checkpoint == str(tmp_path / "step-00000012")
    assert [line["iteration"] for line in seen if "kind" not in line] == [4, 8, 12]
    written = [line for line in seen if "kind" in line]
    assert [line["iteration"] for line in written] == [2, 4, 6, 8, 10, 12]
    assert {line["kind"] for line in written} == {"checkpoint"}
    assert sorted(path.name for path in tmp_path.iterdir())[0] == ".lock"
    assert len(list(tmp_path.iterdir())) == 4


def test_what_a_killed_run_left_is_removed_and_two_runs_do_not_share_a_folder(tmp_path):
    (tmp_path / ".step-00000004-abc" / WEIGHTS).mkdir(parents=True)
    with (
        contextlib.closing(CheckpointFolder(tmp_path, 2)),
        pytest.raises(InputError, match="another run is writing"),
    ):
        CheckpointFolder(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_two_runs_do_not_train_into_one_folder(tmp_path):
    """The second is refused before it touches what the first has written."""
    first = train(parameters(), tmp_path)
    written = (tmp_path / "metrics.jsonl").read_bytes()
    begun = []

    def again(line):
        begun.append(line)
        with pytest.raises(InputError, match="another run is training into this folder"):
            train(parameters(), tmp_path)

    train(parameters(), tmp_path, observer=Calling(again))
    assert begun and (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == written.count(b"\n")
    # the lock ends with the run
    assert train(parameters(), tmp_path).losses == first.losses


def test_a_refused_run_leaves_the_metrics_of_the_one_before(tmp_path):
    train(parameters(checkpoint_every=4), tmp_path)
    written = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="go on from it"):
        train(parameters(checkpoint_every=4), tmp_path)
    assert written and (tmp_path / "metrics.jsonl").read_bytes() == written


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    chosen = parameters(checkpoint_folder=str(tmp_path), max_steps=4)
    train(chosen)
    with pytest.raises(InputError, match=r"checkpoint of step 4, but .* from the beginning"):
        train(chosen)
    done = train(chosen.with_training(resume="latest", max_steps=6))
    assert done.first_iteration == 4 and done.iterations == 2 and steps_in(tmp_path) == [4, 6]
    again = train(chosen.with_training(resume="latest"))
    assert again.iterations == 0 and any("nothing is left to do" in n for n in again.notices)


def test_latest_before_the_first_checkpoint_starts_from_the_beginning(tmp_path, capsys):
    place, output = tmp_path / "c", tmp_path / "o"
    chosen = parameters(max_steps=2, resume="latest", checkpoint_folder=str(place))
    (tmp_path / "p.yaml").write_text(json.dumps(chosen.to_sections()))
    (place / ".step-00000001").mkdir(parents=True)  # killed before it was whole
    assert main(["train", "-f", str(tmp_path / "p.yaml"), "--output", str(output)]) == 0
    said = f"no checkpoint in {place} yet: starting from the beginning"
    assert capsys.readouterr().err.count(said) == 1
    result = json.loads((output / "result.json").read_text())
    assert result["first_iteration"] == 0 and said in result["notices"]
    again = train(chosen)
    assert again.first_iteration == 2 and said not in again.notices
    with pytest.raises(InputError, match="nowhere holds no checkpoint"):
        train(parameters(max_steps=2, resume=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("given", "message"),
    [("latest", "no training.checkpoint_folder"), ("/nonexistent", "holds no checkpoint")],
)
def test_what_cannot_be_found_is_said(given, message):
    with pytest.raises(InputError, match=message):
        find_checkpoint(given)


def test_checkpoints_without_a_place_are_refused():
    with pytest.raises(InputError, match=r"checkpoint_every is 3, but there is no folder"):
        train(parameters(checkpoint_every=3))


def test_metrics_go_on_from_the_checkpoint(tmp_path):
    options = {"checkpoint_every": 3, "log_every": 2}
    train(parameters(max_steps=5, **options), tmp_path)
    shutil.rmtree(tmp_path / "checkpoint" / "step-00000005")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "lo')  # a line that a kill cut short
    train(parameters(resume="latest", **options), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    intervals = [line["iteration"] for line in lines if "kind" not in line]
    checkpoints = [line["iteration"] for line in lines if line.get("kind") == "checkpoint"]
    assert intervals == [2, 4, 6, 8, 10, 12] and checkpoints == [3, 6, 9, 12]


@pytest.mark.parametrize("rate", [1e30, 1e18])
def test_divergence_keeps_the_checkpoint_from_before(tmp_path, rate):
    steady = parameters(model={"loss": "mse"}, max_steps=4, checkpoint_folder=str(tmp_path))
    train(steady)
    wild = parameters(
        model={"loss": "mse"},
        batches=300,
        learning_rate=rate,
        resume="latest",
        checkpoint_folder=str(tmp_path),
        checkpoint_every=1,
    )
    result = train(wild)
    assert result.status == "diverged" and result.first_iteration == 4
    (said,) = [notice for notice in result.notices if notice.startswith("training diverged")]
    assert "nan" in said or "not finite" in said
    assert str(result.checkpoint) in said and f"{rate:g}" in said
    kept = whole_checkpoint(find_checkpoint(str(tmp_path)))
    dense = [t for name, t in stored(kept.folder).items() if not name.startswith("embeddings")]
    assert all(bool(tensor.isfinite().all()) for tensor in dense)


# ---- kills ------------------------------------------------------------------------


def command(path, output, *more):
    return [
        *(sys.executable, "-m", "dlrm_core", "train", "-f", str(path)),
        *("--output", str(output), *more),
    ]


def test_killed_at_random_it_goes_on_to_the_same_bits(tmp_path):
    """Real SIGKILLs of the command; tests/campaigns/kills.py does 200 of them."""
    chosen = parameters(
        {"loader": "prefetch"},
        optimizer="adagrad",
        batches=400,
        checkpoint_every=5,
        log_every=100,
        **SCHEDULE,
    )
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps(chosen.to_sections()))
    _, weights, _ = trained(chosen)
    kills, when = 0, random.Random(1)
    while True:
        resume = ["--resume", "latest"] if steps_in(tmp_path / "o" / "checkpoint") else []
        process = subprocess.Popen(
            command(path, tmp_path / "o", *resume), stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        if kills == 2:
            rest = process.communicate(timeout=120)[0]
            assert process.returncode == 0, rest
            break
        # some checkpoints in, at a moment that is not theirs
        for _ in range(when.randrange(2, 12)):
            process.stdout.readline()
        time.sleep(0.02 * when.random())
        process.kill()
        process.wait()
        process.stdout.close()
        kills += 1
        steps = steps_in(tmp_path / "o" / "checkpoint")
        if steps[-1] == 400:  # this process came late to kill it: from the beginning
            shutil.rmtree(tmp_path / "o")
            kills = 0
            continue
        for step in steps:
            whole_checkpoint(tmp_path / "o" / "checkpoint" / f"step-{step:08d}")
    last = tmp_path / "o" / "checkpoint" / "step-00000400"
    assert same_bits(stored(last), weights)


def test_a_scheduler_that_ends_the_run_gets_a_checkpoint(tmp_path):
    """SIGTERM: the iteration ends, a checkpoint is written, the exit code says interrupted."""
    chosen = parameters(batches=10_000_000, log_every=50)
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps(chosen.to_sections()))
    process = subprocess.Popen(
        command(path, tmp_path / "o", "-p", f"training.checkpoint_folder={tmp_path / 'c'}"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    last = json.loads(process.communicate(timeout=200)[0].splitlines()[-1])
    assert process.returncode == 130 and last["status"] == "interrupted"
    assert json.loads((tmp_path / "o" / "result.json").read_text())["status"] == "interrupted"
    (step,) = steps_in(tmp_path / "c")
    assert step == last["iterations"] and last["checkpoint"].endswith(f"{step:08d}")
    whole_checkpoint(tmp_path / "c" / f"step-{step:08d}")
