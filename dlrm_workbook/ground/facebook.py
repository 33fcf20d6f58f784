"""The command line of facebookresearch/dlrm's ``dlrm_s_pytorch.py``, for ``--like``.

Source: the argument parser of ``dlrm_s_pytorch.py`` at commit 090956e, and what that script
does with each argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_workbook.ground.like import Script, choice_of, flags_of, mapped

SCRIPT = "dlrm_s_pytorch.py"

FLAGS = flags_of("facebookresearch/dlrm")


def _sections(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A parameters file's sections.

    Args:
        values: of all flags, by :attr:`Flag.key`.
        given: of those that the command has.
    """
    tree: dict[str, Any] = {
        "title": _title(values["arch_embedding_size"], values["mini_batch_size"], given),
        "model": {"mlp_sizes": "facebook", "init": "facebook"},
        "data": {"generator": "facebook_loop", "loader": "synchronous"},
        "training": {},
    }
    training = mapped(FLAGS, values, tree)["training"]
    training["batches"], epochs = _length(values)
    # the stream need neither end nor begin again where it is as long as the run
    tree["data"]["samples"], training["epochs"] = epochs or (None, None)
    if epochs:
        tree["data"]["drop_last"] = False
    # the script trains on the CPU where CUDA finds no GPU
    training["device"] = "auto" if values["use_gpu"] else "cpu"
    optimizers = {"rwsadagrad": "rowwise_adagrad", "sgd": "sgd", "adagrad": "adagrad"}
    training["optimizer"] = choice_of("--optimizer", values["optimizer"], optimizers)
    choice_of("--arch-interaction-op", values["arch_interaction_op"], {"dot": "", "cat": ""})
    if values["lr_decay_start_step"] < values["lr_num_warmup_steps"]:
        raise InputError(
            f"--like: --lr-decay-start-step is {values['lr_decay_start_step']}, but "
            f"--lr-num-warmup-steps is {values['lr_num_warmup_steps']}: the script ends where "
            "the decay starts before the warm-up has finished"
        )
    if values["lr_num_decay_steps"] == 0:
        del training["lr_decay_start"]  # without a decay only the check above reads it
    if values["lr_num_decay_steps"] or values["lr_num_warmup_steps"]:
        training["lr_schedule"] = "facebook"
    return tree


def _length(values: dict[str, Any]) -> tuple[int, tuple[int, int] | None]:
    """Iterations of the run; and samples and number of its epochs, where these matter.

    ``--num-batches`` says how many batches an epoch has, or ``--data-size`` how many samples:
    then the last batch may be smaller. Every epoch has the samples of the first.
    """
    count, samples = values["num_batches"], values["data_size"]
    size, epochs = max(1, values["mini_batch_size"]), values["nepochs"]
    if epochs < 1:
        raise InputError(f"--like: --nepochs is {epochs}, expected at least 1")
    if count != 0:
        samples = count * size
    elif samples < 1:
        raise InputError(f"--like: --data-size is {samples}, expected at least 1")
    batches = -(-samples // size)
    return epochs * batches, (samples, epochs) if epochs > 1 or samples % size else None


def _title(rows: Sequence[int], batch: int, given: dict[str, Any]) -> str:
    """What the page is called; it says whose tables they are where nobody gave any."""
    numbers = [f"{count:,}" for count in rows]
    if len(rows) == 1:
        tables = f"1 table of {numbers[0]} rows"
    elif len(set(rows)) == 1:
        tables = f"{len(rows)} tables of {numbers[0]} rows"
    elif len(rows) <= 4:
        tables = f"{len(rows)} tables of {', '.join(numbers[:-1])} and {numbers[-1]} rows"
    else:
        tables = f"{len(rows)} tables of {min(rows):,} to {max(rows):,} rows"
    if "arch_embedding_size" not in given:
        tables += " (the script's default: the command has no --arch-embedding-size)"
    return f"Like {SCRIPT}: batch {batch:,}, {tables}"


FACEBOOK = Script("facebookresearch/dlrm", (SCRIPT,), FLAGS, _sections)
"""The script that others are compared with."""
