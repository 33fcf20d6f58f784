"""The learning rate's schedule: the published formula, its clamp, and that updates obey it."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observers import Calling
from small_training import parameters

from dlrm_core.base.errors import InputError
from dlrm_core.config import TrainingConfig, parameters_from_sections
from dlrm_core.run.schedules import learning_rate
from dlrm_core.train import Trainer
from dlrm_workbook.analysis.training import schedule


def config_of(base, warmup, decay_start, decay_steps, power=2.0, end=0.0):
    law = {"lr_warmup_steps": warmup, "lr_decay_start": decay_start, "lr_decay_steps": decay_steps}
    return TrainingConfig(learning_rate=base, lr_decay_power=power, lr_end=end, **law)


DEEPSPARK = config_of(0.1, 2750, 49_315, 27_772)


def test_published_figures():
    """DeepSpark's command: lr 0.1, W 2750, D 49315, N 27772, end 0."""
    assert learning_rate(DEEPSPARK, 1) == pytest.approx(0.1 / 2750)
    assert learning_rate(DEEPSPARK, 1375) == pytest.approx(0.05)
    assert (
        learning_rate(DEEPSPARK, 2750)
        == learning_rate(DEEPSPARK, 30_000)
        == learning_rate(DEEPSPARK, 49_315)
        == 0.1
    )
    assert learning_rate(DEEPSPARK, 49_315 + 27_772 // 2) == pytest.approx(0.025)
    assert learning_rate(DEEPSPARK, 49_315 + 27_772) == 0.0
    # without the clamp the square would rise again: 0.1 at this step
    assert learning_rate(DEEPSPARK, 49_315 + 2 * 27_772) == 0.0


@given(
    base=st.floats(1e-6, 100.0),
    warmup=st.integers(0, 50),
    plateau=st.integers(0, 50),
    decay=st.integers(1, 50),
    power=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    end=st.floats(0.0, 1.0),
)
def test_shape_of_any_schedule(base, warmup, plateau, decay, power, end):
    end = end * base
    config = config_of(base, warmup, warmup + plateau, decay, power, end)
    rates = [learning_rate(config, step) for step in range(1, warmup + plateau + decay + 30)]
    rising, falling = rates[: max(warmup, 1)], rates[max(warmup - 1, 0) :]
    assert all(a <= b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert max(rates) <= base and min(falling) >= end
    assert rates[-30:] == [end] * 30
    for step in range(1, warmup):
        assert rates[step - 1] == pytest.approx(base * step / warmup, rel=1e-9, abs=1e-12 * base)


@given(
    base=st.floats(1e-6, 100.0),
    warmup=st.integers(2, 50),
    plateau=st.integers(0, 50),
    decay=st.integers(0, 50),
)
def test_facebooks_law_repeats_the_last_rate_that_it_set(base, warmup, plateau, decay):
    """Held to the rule as dlrm_s_pytorch.py states it, step by step with its memory."""
    start = warmup + plateau if decay else 0
    config = dataclasses.replace(
        config_of(base, warmup, start, decay), lr_schedule="facebook", lr_end=0.0
    )
    last = None
    for step in range(1, warmup + plateau + decay + 20):
        if step < warmup:
            last = base * (1.0 - (warmup - step) / warmup)
        elif start <= step < start + decay:
            last = max(1e-7, base * ((decay - (step - start)) / decay) ** 2)
        elif not decay:
            last = base
        assert learning_rate(config, step) == pytest.approx(last, rel=1e-12)


def test_no_schedule_is_constant():
    config = parameters_from_sections({}).training
    assert {learning_rate(config, step) for step in range(1, 10_000)} == {config.learning_rate}
    assert schedule(parameters_from_sections({}), 100).empty


def test_a_shown_schedule_has_the_corners():
    curve = schedule(dataclasses.replace(parameters_from_sections({}), training=DEEPSPARK), 100_000)
    assert len(curve) < 410
    assert {1, 2750, 49_315, 77_087, 100_000} <= set(curve["iteration"])
    for step, rate in zip(curve["iteration"], curve["learning_rate"], strict=True):
        assert rate == learning_rate(DEEPSPARK, int(step)) and math.isfinite(rate)
    short = parameters_from_sections({"training": {"lr_warmup_steps": 3, "learning_rate": 1.0}})
    assert schedule(short, 4)["learning_rate"].tolist() == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"lr_decay_start": 5}, ["lr_decay_start is 5", "lr_decay_steps"]),
        (
            {"lr_warmup_steps": 9, "lr_decay_start": 5, "lr_decay_steps": 3},
            ["lr_decay_start is 5", "lr_warmup_steps is 9"],
        ),
        (
            {"lr_decay_steps": 3, "lr_end": 2.0, "learning_rate": 1.0},
            ["lr_end is 2", "learning_rate is 1"],
        ),
        (
            {"lr_schedule": "facebook", "lr_decay_power": 1.0},
            ["lr_schedule is 'facebook'", "lr_decay_power is 1"],
        ),
        (
            {"lr_schedule": "facebook", "lr_decay_start": 5, "lr_decay_steps": 3},
            ["lr_schedule is 'facebook'", "lr_warmup_steps is 0"],
        ),
        (
            {"optimizer": "adam", "embedding_backend": "fused"},
            ["optimizer is 'adam'", "embedding_backend is 'fused'"],
        ),
    ],
)
def test_what_cannot_work_is_refused(training, words):
    with pytest.raises(InputError) as error:
        parameters_from_sections({"training": training})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("backend", ["torch", "fused"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_every_update_obeys_the_schedule(backend, optimizer):
    law = {"lr_warmup_steps": 4, "lr_decay_start": 6, "lr_decay_steps": 4}
    kinds = {"optimizer": optimizer, "embedding_backend": backend}
    chosen = parameters(batches=14, log_every=1, learning_rate=0.5, **law, **kinds)
    trainer = Trainer(chosen)
    weights = list(trainer.model.parameters())
    seen, changes, said = [], [], []

    def note(done):
        seen.append([weight.detach().clone() for weight in weights])

    trainer.train(Calling(said.append, note))
    assert [interval["learning_rate"] for interval in said] == [
        learning_rate(chosen.training, step) for step in range(1, 15)
    ]
    for before, after in itertools.pairwise(seen):
        changes.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
    assert all(any(moved) for moved in changes[:9])
    # from D + N on the rate is 0: nothing moves, neither tables nor dense weights
    assert not any(any(moved) for moved in changes[9:])
    # the first update, by base / W, of every weight, against a step of that rate
    for place, rate in ((0, 0.5 / 4), (6, 0.5 * (3 / 4) ** 2)):
        again = Trainer(chosen.with_training(learning_rate=rate, **dict.fromkeys(law, 0)))
        if place and optimizer != "sgd":
            continue  # its state is that of other steps
        with torch.no_grad():
            for weight, value in zip(again.model.parameters(), seen[place], strict=True):
                weight.copy_(value)
        for _ in range(place):
            next(again.batches)
        again.iterate()
        for weight, value in zip(again.model.parameters(), seen[place + 1], strict=True):
            assert torch.equal(weight, value)
