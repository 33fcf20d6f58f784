"""``--like``: the command line of facebookresearch/dlrm's ``dlrm_s_pytorch.py`` as parameters.

:data:`FLAGS` says of every flag which parameter it becomes, or why it is refused, or why it
changes nothing here; ``dlrm help flags`` prints them. A flag that is left out has
the script's default, not ours. Nothing of the command is run.

Source: the argument parser of ``dlrm_s_pytorch.py`` at commit 090956e, and what that script
does with each argument.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn

from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import shown
from dlrm_core.config import GivenSections, parameters_from_sections

SCRIPT = "dlrm_s_pytorch.py"


def _integers(text: str) -> list[int]:
    return _separated(text, int, "whole numbers such as 4-3-2")


def _numbers(text: str) -> list[float]:
    return _separated(text, float, "numbers such as 1.0-2.5")


def _separated(text: str, kind: Callable[[str], Any], expected: str) -> list[Any]:
    try:
        return [kind(word) for word in text.split("-")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)}, expected {expected}") from None


@dataclass(frozen=True)
class Flag:
    """One flag of the script.

    ``read`` makes a value of the word after the flag; None: the flag takes no word and means
    true. Exactly one holds: the value becomes ``parameter``; a value other than the default is
    refused, for the reason ``refused``; or the flag has no effect, for the reason ``unused``.
    """

    name: str
    read: Callable[[str], Any] | None
    default: Any
    parameter: str = ""
    refused: str = ""
    unused: str = ""

    @property
    def key(self) -> str:
        """The name that argparse gives the flag's value."""
        return self.name.removeprefix("--").replace("-", "_")


_CRITEO = "it is for --data-generation=dataset"
_GAUSSIAN = "it is for --rand-data-dist=gaussian"
_MLPERF = "it is for --mlperf-logging"
_NEVER_READ = "the script does not use it"
_PRINTED = "it changes what the script prints"
_TIMED = "times are always measured here"
_MIXED = "it is for --md-flag"
_QUOTIENT = "it is for --qr-flag"
_QUANTIZED = "the model here is trained, and the script quantizes for inference only"
_RANKS = "several ranks are started by torchrun (docs/scaling.md)"

FLAGS = (
    Flag("--arch-sparse-feature-size", int, 2, "model.embedding_dim"),
    Flag("--arch-embedding-size", _integers, [4, 3, 2], "model.table_rows"),
    Flag("--arch-mlp-bot", _integers, [4, 3, 2], "model.bottom_mlp"),
    Flag("--arch-mlp-top", _integers, [4, 2, 1], "model.top_mlp"),
    Flag("--arch-interaction-op", str, "dot", "model.interaction"),
    Flag("--arch-interaction-itself", None, False, "model.interaction_itself"),
    Flag("--weighted-pooling", str, None, refused="rows of a bag are added up without weights"),
    Flag("--md-flag", None, False, refused="all tables have rows of the same width"),
    Flag("--md-threshold", int, 200, unused=_MIXED),
    Flag("--md-temperature", float, 0.3, unused=_MIXED),
    Flag("--md-round-dims", None, False, unused=_MIXED),
    Flag("--qr-flag", None, False, refused="there are no quotient-remainder tables"),
    Flag("--qr-threshold", int, 200, unused=_QUOTIENT),
    Flag("--qr-operation", str, "mult", unused=_QUOTIENT),
    Flag("--qr-collisions", int, 4, unused=_QUOTIENT),
    Flag("--activation-function", str, "relu", unused=f"{_NEVER_READ}: its layers have ReLU"),
    Flag("--loss-function", str, "mse", "model.loss"),
    Flag("--loss-weights", _numbers, [1.0, 1.0], "model.loss_weights"),
    Flag("--loss-threshold", float, 0.0, "model.loss_threshold"),
    Flag("--round-targets", bool, False, "data.round_targets"),
    Flag("--data-size", int, 1, "data.samples"),
    Flag("--num-batches", int, 0, "training.batches"),
    Flag(
        "--data-generation",
        str,
        "random",
        refused="Criteo's files are read in other layouts (docs/datasets.md), and 'internal' is "
        "a library of facebook's",
    ),
    Flag("--rand-data-dist", str, "uniform", refused="rows follow facebook's uniform law only"),
    Flag("--rand-data-min", float, 0.0, unused=_GAUSSIAN),
    Flag("--rand-data-max", float, 1.0, unused=_GAUSSIAN),
    Flag("--rand-data-mu", float, -1.0, unused=_GAUSSIAN),
    Flag("--rand-data-sigma", float, 1.0, unused=_GAUSSIAN),
    Flag("--data-trace-file", str, "./input/dist_emb_j.log", unused=_NEVER_READ),
    Flag("--data-set", str, "kaggle", unused=_CRITEO),
    Flag("--raw-data-file", str, "", unused=_CRITEO),
    Flag("--processed-data-file", str, "", unused=_CRITEO),
    Flag("--data-randomize", str, "total", unused=_CRITEO),
    Flag("--data-trace-enable-padding", bool, False, unused=_NEVER_READ),
    Flag("--max-ind-range", int, -1, unused=_CRITEO),
    Flag("--data-sub-sample-rate", float, 0.0, unused=_CRITEO),
    Flag("--num-indices-per-lookup", int, 10, "data.indices_per_lookup"),
    Flag("--num-indices-per-lookup-fixed", bool, False, "data.fixed_pooling"),
    Flag(
        "--num-workers",
        int,
        0,
        refused="batches are made by no other process; -p data.loader=prefetch makes them in a "
        "background thread",
    ),
    Flag("--memory-map", None, False, unused=_CRITEO),
    Flag("--mini-batch-size", int, 1, "training.batch_size"),
    Flag("--nepochs", int, 1, "training.epochs"),
    Flag("--learning-rate", float, 0.01, "training.learning_rate"),
    Flag("--print-precision", int, 5, unused=_PRINTED),
    Flag("--numpy-rand-seed", int, 123, "training.seed"),
    Flag("--sync-dense-params", bool, True, unused="it is for several GPUs in one process"),
    Flag("--optimizer", str, "sgd", "training.optimizer"),
    Flag("--dataset-multiprocessing", None, False, unused=_CRITEO),
    Flag("--inference-only", None, False, refused="this trains; see dlrm infer and dlrm evaluate"),
    Flag("--quantize-mlp-with-bit", int, 32, refused=_QUANTIZED),
    Flag("--quantize-emb-with-bit", int, 32, refused=_QUANTIZED),
    Flag("--save-onnx", None, False, refused="no ONNX file is written"),
    Flag("--use-gpu", None, False, "training.device"),
    Flag("--local_rank", int, -1, refused=_RANKS),
    Flag("--dist-backend", str, "", refused=_RANKS),
    Flag("--print-freq", int, 1, "training.log_every"),
    Flag(
        "--test-freq",
        int,
        -1,
        refused="on random data the script's test reads the training batches again and restarts "
        "their stream; -p training.eval_every=N evaluates without that",
    ),
    Flag("--test-mini-batch-size", int, -1, unused=_CRITEO),
    Flag("--test-num-workers", int, -1, unused=_CRITEO),
    Flag("--print-time", None, False, unused=_TIMED),
    Flag("--print-wall-time", None, False, unused=_TIMED),
    Flag("--debug-mode", None, False, unused=_PRINTED),
    Flag("--enable-profiling", None, False, unused="dlrm run profile and dlrm record profile"),
    Flag("--plot-compute-graph", None, False, refused="the script ends with an error itself"),
    Flag("--tensor-board-filename", str, "run_kaggle_pt", unused="no TensorBoard log is written"),
    Flag("--save-model", str, "", refused="-p training.checkpoint_folder=DIR saves checkpoints"),
    Flag("--load-model", str, "", refused="its files are not read; see -p training.resume=DIR"),
    Flag("--mlperf-logging", None, False, refused="dlrm train --mllog FILE writes MLPerf's log"),
    Flag("--mlperf-acc-threshold", float, 0.0, unused=_MLPERF),
    Flag("--mlperf-auc-threshold", float, 0.0, unused=_MLPERF),
    Flag("--mlperf-bin-loader", None, False, unused=_MLPERF),
    Flag("--mlperf-bin-shuffle", None, False, unused=_MLPERF),
    Flag("--mlperf-grad-accum-iter", int, 1, unused=_MLPERF),
    Flag("--lr-num-warmup-steps", int, 0, "training.lr_warmup_steps"),
    Flag("--lr-decay-start-step", int, 0, "training.lr_decay_start"),
    Flag("--lr-num-decay-steps", int, 0, "training.lr_decay_steps"),
)
"""In the order of the script's own help."""

_FLAG_OF = {flag.parameter: flag.name for flag in FLAGS if flag.parameter}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message if len(message) <= 300 else message[:300] + "..."
        raise InputError(f"--like: {message}")


def translated(command: str) -> tuple[GivenSections, list[str]]:
    """The parameters that a command of ``dlrm_s_pytorch.py`` stands for.

    Args:
        command: as typed into a shell, ``[python] [FOLDER/]dlrm_s_pytorch.py --flag ...``;
            quotes and abbreviated flags are read as a shell and the script read them.

    Returns:
        The parameters, which are valid; and a sentence for each flag that was given and has no
        effect here, or another one than its spelling suggests.

    Raises:
        InputError: it is no such command, a flag is unknown or refused, or the values do not
            fit together. The message names the flag.
    """
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for flag in FLAGS:
        if flag.read is None:
            parser.add_argument(flag.name, dest=flag.key, action="store_true")
        else:
            parser.add_argument(flag.name, dest=flag.key, type=flag.read)
    parsed, unknown = parser.parse_known_args(_arguments(command))
    if unknown:
        raise InputError(f"--like: {SCRIPT} takes no {shown(unknown[0])}")
    given = vars(parsed)
    for flag in FLAGS:
        value = given.get(flag.key, flag.default)
        if flag.refused and value != flag.default:
            raise InputError(f"--like: {_spelt(flag, value)} is not supported: {flag.refused}")
    notes = [
        f"{flag.name} has no effect: {flag.unused}"
        for flag in FLAGS
        if flag.unused and flag.key in given
    ]
    notes += [
        f"{flag.name} is true whatever word follows: the script reads it so"
        for flag in FLAGS
        if flag.parameter and flag.read is bool and given.get(flag.key)
    ]
    values = {flag.key: flag.default for flag in FLAGS} | given
    sections = GivenSections(f"like-{PurePath(SCRIPT).stem}", _sections(values, given))
    try:
        parameters_from_sections(sections.tree)
    except InputError as error:
        message = re.sub(r"\w+\.\w+", lambda name: _FLAG_OF.get(name[0], name[0]), str(error))
        raise InputError(f"--like: {message}") from None
    return sections, notes


def _arguments(command: str) -> list[str]:
    """The words after the script's name."""
    try:
        # a command that was broken over lines keeps its backslashes between single quotes
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"--like: {shown(command)} is no command: {error}") from None
    place = next((i for i, word in enumerate(words) if PurePath(word).name == SCRIPT), None)
    if place is None:
        raise InputError(f"--like: {shown(command)} does not name {SCRIPT}")
    before = words[:place]
    if before and (len(before) > 1 or not re.fullmatch(r"python[\d.]*", PurePath(before[0]).name)):
        raise InputError(
            f"--like: before {SCRIPT} stands {shown(shlex.join(before))}, expected python or "
            "nothing: how processes are started and placed is not translated"
        )
    return words[place + 1 :]


def _spelt(flag: Flag, value: Any) -> str:
    return flag.name if flag.read is None else f"{flag.name}={value}"


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
    for flag in FLAGS:
        if flag.parameter:
            section, _, leaf = flag.parameter.partition(".")
            tree[section][leaf] = values[flag.key]
    training = tree["training"]
    training["batches"], epochs = _length(values)
    # the stream need neither end nor begin again where it is as long as the run
    tree["data"]["samples"], training["epochs"] = epochs or (None, None)
    if epochs:
        tree["data"]["drop_last"] = False
    # the script trains on the CPU where CUDA finds no GPU
    training["device"] = "auto" if values["use_gpu"] else "cpu"
    optimizers = {"rwsadagrad": "rowwise_adagrad", "sgd": "sgd", "adagrad": "adagrad"}
    if values["optimizer"] not in optimizers:
        raise InputError(
            f"--like: --optimizer is {shown(values['optimizer'])}, expected one of "
            f"{', '.join(optimizers)}"
        )
    training["optimizer"] = optimizers[values["optimizer"]]
    if values["arch_interaction_op"] not in ("dot", "cat"):
        raise InputError(
            f"--like: --arch-interaction-op is {shown(values['arch_interaction_op'])}, expected "
            "one of dot, cat"
        )
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
