"""``auto`` of the dense part: candidates, turns, who wins, and that a run keeps its choice."""

import json

import pytest
import torch
from slow_tiles import use_slow_tiles
from test_embeddings import parameters

from dlrm_core import dense
from dlrm_core.base import engines
from dlrm_core.config import TrainingConfig
from dlrm_core.interactions import DotInteraction
from dlrm_core.train import Trainer, train
from dlrm_kernels import choices, dense_choice
from dlrm_kernels.memory import dense_peak
from dlrm_ranks import step as ranks

DOT = DotInteraction(4, 16)
CPU = torch.device("cpu")
AUTO = {"dense_backend": "auto", "fp32_matmul": "auto"}
MKL, ONEDNN, TILES = ("torch", "default"), ("torch", "onednn"), ("fused", "bf16x2")


@pytest.fixture(autouse=True)
def _forget_choices():
    dense_choice.choose.cache_clear()
    yield
    dense_choice.choose.cache_clear()


@pytest.fixture
def tiles(monkeypatch):
    use_slow_tiles(monkeypatch.setattr)


@pytest.fixture
def no_tiles(monkeypatch):
    monkeypatch.setattr("dlrm_kernels.dense.why_no_tiles", lambda: "no such units")
    monkeypatch.setattr("dlrm_kernels.products._relative_error", lambda *layer: 0.0)


class Clock:
    """Seconds that pass only when a candidate works."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def candidate(self, name, *seconds):
        left = list(seconds)

        def work():
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


def test_candidates_take_turns_and_the_first_call_does_not_count():
    clock = Clock()
    work = {MKL: clock.candidate("mkl", 9.0, 0.02), TILES: clock.candidate("tiles", 5.0, 0.01)}
    times = dense_choice.time_passes(work, clock, budget_s=10.0)
    assert times == {MKL: pytest.approx(20.0), TILES: pytest.approx(10.0)}
    rounds = clock.order[2:]
    assert len(rounds) == 2 * choices.MOST_TIMINGS
    assert rounds[:6] == ["mkl", "tiles", "tiles", "mkl", "mkl", "tiles"]


@pytest.mark.parametrize(("seconds", "timings"), [(0.01, 7), (0.1, 2), (5.0, 1)])
def test_timing_ends_with_its_budget_but_times_each_once(seconds, timings):
    clock = Clock()
    work = {pair: clock.candidate(pair, seconds) for pair in (MKL, ONEDNN)}
    dense_choice.time_passes(work, clock, budget_s=0.3)
    assert clock.order.count(MKL) == clock.order.count(ONEDNN) == 1 + timings


def test_one_slow_moment_does_not_decide():
    clock = Clock()
    work = {
        MKL: clock.candidate("mkl", 0.02),
        TILES: clock.candidate("tiles", 0.01, 0.01, 0.5, 0.01),
    }
    assert choices.fastest(dense_choice.time_passes(work, clock, 10.0)) == TILES


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({MKL: 46.0, ONEDNN: 44.5, TILES: 15.0}, TILES),  # a unit of one's own
        ({MKL: 46.0, TILES: 44.5}, MKL),  # a shared one: as fast is not faster
        ({MKL: 46.0, TILES: 60.0}, MKL),
        ({MKL: 46.0, ONEDNN: 30.0, TILES: 29.0}, ONEDNN),
    ],
)
def test_bf16x2_is_chosen_only_where_it_is_faster_now(times, chosen):
    assert choices.fastest(times) == chosen


@pytest.mark.parametrize(
    ("settings", "pairs"),
    [
        (AUTO, [MKL, ONEDNN, TILES]),
        ({"fp32_matmul": "auto"}, [MKL, ONEDNN]),
        ({"dense_backend": "fused", "fp32_matmul": "auto"}, [TILES]),
        ({"dense_backend": "auto"}, [MKL]),
        ({"dense_backend": "auto", "fp32_matmul": "onednn"}, [ONEDNN]),
        ({"dense_backend": "auto", "precision": "bf16"}, [MKL, ("fused", "default")]),
        (AUTO | {"precision": "bf16"}, [MKL, ("fused", "default")]),
        (AUTO | {"precision": "fp16"}, [MKL]),
        (AUTO | {"compile": True}, [MKL, ONEDNN]),
    ],
)
def test_what_is_fixed_stays_fixed(tiles, settings, pairs):
    found, reason = dense_choice.candidates(TrainingConfig(**settings), DOT, CPU)
    assert found == pairs
    assert reason
    for pair in found:  # each can be asked for by name
        TrainingConfig(**settings | dict(zip(dense.DENSE_CHOICE, pair, strict=True)))


def test_without_tiles_the_libraries_race_and_a_gpu_has_one_candidate(no_tiles):
    both = TrainingConfig(**AUTO)
    pairs, reason = dense_choice.candidates(both, DOT, CPU)
    assert pairs == [MKL, ONEDNN] and "no such units" in reason
    assert dense_choice.candidates(both, DOT, torch.device("cuda"))[0] == [MKL]
    fused = TrainingConfig(dense_backend="fused", fp32_matmul="auto")
    assert dense_choice.candidates(fused, DOT, CPU)[0] == [
        ("fused", "default"),
        ("fused", "onednn"),
    ]


def test_a_choice_is_made_once_a_process_and_says_what_was_timed(monkeypatch, tiles):
    asked = []

    def times(work):
        asked.append(list(work))
        return dict.fromkeys(work, 20.0) | {TILES: 9.5}

    monkeypatch.setattr(dense_choice, "time_passes", times)
    given = parameters(**AUTO)
    for _ in range(2):
        found, (notice,) = dense.resolve_dense(given, CPU)
        assert (found.training.dense_backend, found.training.fp32_matmul) == TILES
    assert len(asked) == 1
    assert notice.startswith(
        "training.dense_backend auto, training.fp32_matmul auto: fused with fp32_matmul bf16x2, "
        "9.5 ms; torch with fp32_matmul default 20.0"
    )
    assert "64 samples" in notice
    # another batch is another race, another learning rate is not
    dense.resolve_dense(given.with_training(learning_rate=0.5), CPU)
    assert len(asked) == 1
    dense.resolve_dense(given.with_training(batch_size=32), CPU)
    assert len(asked) == 2


def test_a_library_that_rounds_is_left_out(monkeypatch, no_tiles):
    monkeypatch.setattr(dense_choice, "set_fp32_matmul", lambda choice, model, device: (
        ["training.fp32_matmul: onednn makes a relative error of 2e-03"]
        if choice == "onednn" else []
    ))  # fmt: skip
    found, (notice,) = dense.resolve_dense(parameters(**AUTO), CPU)
    assert found.training.fp32_matmul == "default"
    assert "left out: torch with fp32_matmul onednn: onednn makes a relative error" in notice


def test_nothing_is_asked_where_nothing_is_open(monkeypatch):
    monkeypatch.setattr(engines, "find_engine", lambda name: pytest.fail("asked"))
    given = parameters(dense_backend="fused", fp32_matmul="bf16x2")
    assert dense.resolve_dense(given, CPU) == (given, [])


def test_the_core_alone_takes_the_plain_ones(monkeypatch):
    monkeypatch.setattr(engines, "find_engine", lambda name: None)
    found, (notice,) = dense.resolve_dense(parameters(fp32_matmul="auto"), CPU)
    assert found.training.fp32_matmul == "default"
    assert "dlrm_kernels" in notice


def test_the_run_takes_what_was_fastest_and_tells_all_times(monkeypatch, tmp_path):
    use_slow_tiles(monkeypatch.setattr, everywhere=True)
    before = torch.get_rng_state()
    dense.resolve_dense(parameters(**AUTO), CPU)
    assert torch.equal(torch.get_rng_state(), before)
    result = train(parameters(**AUTO), tmp_path)
    (notice,) = [n for n in result.notices if n.startswith("training.dense_backend auto")]
    assert notice in json.loads((tmp_path / "result.json").read_text())["notices"]
    assert "fused with fp32_matmul bf16x2" in notice and "torch with fp32_matmul" in notice
    found, _ = dense.resolve_dense(parameters(**AUTO), CPU)
    named = {leaf: getattr(found.training, leaf) for leaf in dense.DENSE_CHOICE}
    # which one is fastest is this machine's matter and its load's
    assert f": {dense_choice.label(tuple(named.values()))}" in notice
    assert train(parameters(**named)).losses == result.losses


def times_for(first):
    return lambda work: {pair: 1.0 if pair == first else 2.0 for pair in work}


def test_a_resumed_run_keeps_its_choice_bit_for_bit(monkeypatch, no_tiles, tmp_path):
    monkeypatch.setattr(dense_choice, "time_passes", times_for(ONEDNN))
    whole = train(parameters(**AUTO))
    half = parameters(
        **AUTO, max_steps=6, checkpoint_every=6, checkpoint_folder=str(tmp_path / "c")
    )
    begun = train(half)
    # the machine gives something else today
    dense_choice.choose.cache_clear()
    monkeypatch.setattr(dense_choice, "time_passes", times_for(MKL))
    again = half.with_training(max_steps=None, resume="latest")
    resumed = train(again)
    assert begun.losses + resumed.losses == whole.losses
    assert not any("auto" in notice or "settings" in notice for notice in resumed.notices)
    written = json.loads((tmp_path / "c" / "step-00000015" / "checkpoint.json").read_text())
    assert written["parameters"]["training"]["fp32_matmul"] == "onednn"
    # a value that the resumed run fixes replaces the choice, and a notice says so
    fixed = half.with_training(fp32_matmul="default", dense_backend="torch", resume="latest")
    trainer = Trainer(fixed.with_training(max_steps=20), *_checkpoint(fixed))
    assert trainer.parameters.training.fp32_matmul == "default"
    assert any("fp32_matmul" in notice for notice in trainer.notices)


def _checkpoint(given):
    from dlrm_core.run.resume import checkpoint_place, checkpoint_to_resume

    place = checkpoint_place(given.training, None)
    return checkpoint_to_resume(given, place), place


def test_ranks_take_rank_0s_choice(monkeypatch):
    said = [{"dense_backend": "torch", "fp32_matmul": "onednn"}, ["rank 0 says why"]]
    monkeypatch.setattr(ranks, "gathered", lambda world, own: [said, own])
    monkeypatch.setattr(dense_choice, "time_passes", times_for(MKL))
    world = type("World", (), {"device": CPU})()
    found, notices = ranks.resolve_together(parameters(**AUTO), world)
    assert found.training.fp32_matmul == "onednn" and notices == ["rank 0 says why"]
    given = parameters()
    monkeypatch.setattr(ranks, "gathered", lambda world, own: pytest.fail("nothing was open"))
    assert ranks.resolve_together(given, world) == (given, [])


def test_the_forecast_has_room_for_every_candidate(tiles):
    peaks = [
        dense_peak(parameters(dense_backend=backend, fp32_matmul=product))
        for backend, product in (MKL, TILES)
    ]
    sizes = [peak.activations + peak.gradients for peak in peaks]
    found = dense_peak(parameters(**AUTO))
    assert found.activations + found.gradients == max(sizes) > min(sizes)
