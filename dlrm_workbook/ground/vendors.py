"""The command lines of facebook's, NVIDIA's and DeepSpark's DLRM, for ``--like`` and ``-f``.

Sources: the argument parser of facebookresearch/dlrm's ``dlrm_s_pytorch.py`` at commit 090956e, and
what that script does with each argument; ``dlrm.py``, ``main.py`` of NVIDIA DeepLearningExamples,
TensorFlow2/Recommendation/DLRM_and_DCNv2 (commits d53419f, 2693c63); ``scripts/train.py`` and
``scripts/dist_train.py`` of DeepSparkHub, recommendation/ctr/dlrm/pytorch (178a043, 5a25088).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_text
from dlrm_core.base.settings import read_yaml, shown
from dlrm_core.base.text import counted
from dlrm_core.config import GivenSections, load_parameters
from dlrm_workbook.ground.like import Flag, Script, choice_of, flags_of, mapped

FACEBOOK_FLAGS = flags_of("facebookresearch/dlrm")
NVIDIA_FLAGS, DEEPSPARK_FLAGS = flags_of("NVIDIA"), flags_of("DeepSpark")


def _facebook(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A parameters file's sections, as :attr:`~dlrm_workbook.ground.like.Script.sections`."""
    tree: dict[str, Any] = {
        "title": _title(values["arch_embedding_size"], values["mini_batch_size"], given),
        "model": {"mlp_sizes": "facebook", "init": "facebook"},
        "data": {"generator": "facebook_loop", "loader": "synchronous"},
        "training": {},
    }
    training = mapped(FACEBOOK_FLAGS, values, tree)["training"]
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
    if len(set(rows)) == 1:
        tables = f"{counted(len(rows), 'table')} of {numbers[0]} rows"
    elif len(rows) <= 4:
        tables = f"{len(rows)} tables of {', '.join(numbers[:-1])} and {numbers[-1]} rows"
    else:
        tables = f"{len(rows)} tables of {min(rows):,} to {max(rows):,} rows"
    if "arch_embedding_size" not in given:
        tables += " (the script's default: the command has no --arch-embedding-size)"
    return f"Like dlrm_s_pytorch.py: batch {batch:,}, {tables}"


FACEBOOK = Script("facebookresearch/dlrm", ("dlrm_s_pytorch.py",), FACEBOOK_FLAGS, _facebook)
"""The script that others are compared with."""


def _common(values: dict[str, Any], flags: tuple[Flag, ...], title: str) -> dict[str, Any]:
    """What both programs share: NVIDIA's model and schedule, mixed precision, a data set."""
    tree = mapped(
        flags,
        values,
        {
            "title": f"Like {title}, batch {values['batch_size']:,}",
            "model": {"mlp_sizes": "nvidia", "loss": "bce", "init": "torch"},
            "data": {"generator": "dataset", "loader": "prefetch"},
            "training": {"optimizer": "sgd", "tf32": True},
        },
    )
    training = tree["training"]
    if training["seed"] is None:
        del training["seed"]  # theirs is another one each time
    mixed = training["precision"]
    training["precision"] = "fp16" if mixed else "fp32"
    if not mixed:
        del training["loss_scale"]
    if not training["lr_decay_steps"]:
        training |= {"lr_decay_start": 0, "lr_end": 0.0}
    return tree


def _nvidia(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    kinds = {"dot_custom_cuda": "dot", "dot_tensorflow": "dot", "cross": "dcn"}
    tree = _common(values, NVIDIA_FLAGS, "NVIDIA's dlrm.py")
    model, training = tree["model"], tree["training"]
    model["interaction"] = choice_of("--interaction", values["interaction"], kinds)
    if model["interaction"] == "dot":
        del model["dcn_layers"], model["dcn_rank"]
    model["table_rows"] = None  # the data set's
    choice_of("--optimizer", values["optimizer"], {"sgd": "", "adam": ""})
    training["device"] = "cpu" if values["cpu"] else "auto"
    training["max_steps"] = values["max_steps"] if values["max_steps"] > 0 else None
    training["log_every"] = round(values["print_freq"])
    training["embeddings_on_gpu_bytes"] = (
        values["cpu_offloading_threshold_gb"] * 10**9
        if "cpu_offloading_threshold_gb" in given
        else None
    )
    if values["dataset_path"] is None:
        raise InputError("--like: dlrm.py needs --dataset_path, the folder of feature_spec.yaml")
    return tree


def _deepspark(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    for name in ("dataset", "model_config"):
        if values[name] is None:
            raise InputError(f"--like: DeepSpark's script needs --{name}")
    tree = _common(values, DEEPSPARK_FLAGS, "DeepSpark's train.py")
    data, training = tree["data"], tree["training"]
    try:
        tree["model"] |= _model_of(Path(values["model_config"]))
    except InputError as error:
        raise InputError(f"--like: --model_config: {error}") from None
    formats = {"memmap": "terabyte", "bin": "terabyte", "dist": "deepspark_dist"}
    data["format"] = choice_of("--dataset_type", values["dataset_type"], formats)
    data["order"] = "shuffled" if values["shuffle_batch_order"] else "sequential"
    data["drop_last"] = False
    devices = {"cuda": "auto", "cpu": "cpu"}
    training["device"] = choice_of("--device", values["device"], devices)
    training["skip_overflow"] = False  # it takes every step
    if values["test_freq"] is None:
        training["evals_per_epoch"] = 20
    if values["print_freq"] is None:
        training["log_every"] = max(1, 16384 * 2000 // max(1, values["batch_size"]))
    return tree


NVIDIA = Script("NVIDIA", ("dlrm.py",), NVIDIA_FLAGS, _nvidia, launched=True)
DEEPSPARK = Script(
    "DeepSpark", ("train.py", "dist_train.py"), DEEPSPARK_FLAGS, _deepspark, launched=True
)
SCRIPTS = (FACEBOOK, NVIDIA, DEEPSPARK)
"""The programs whose commands ``--like`` translates."""

OFFICIAL = "official_config.json"

CONFIG_LEAVES = {
    "num_numerical_features": "dense_features",
    "categorical_feature_sizes": "table_rows",
    "bottom_mlp_sizes": "bottom_mlp",
    "top_mlp_sizes": "top_mlp",
    "embedding_dim": "embedding_dim",
    "interaction_op": "interaction",
    "self_interaction": "interaction_itself",
}
"""Keys of DeepSpark's model configuration to leaves of the section ``model``."""


def _model_of(file: Path) -> dict[str, Any]:
    """The model of a DeepSpark configuration, a JSON file.

    The one that comes with its program is known where the file is not there.
    """
    if file.name == OFFICIAL and not file.exists():
        model = load_parameters("deepspark").to_sections()["model"]
        return {leaf: model[leaf] for leaf in CONFIG_LEAVES.values()}
    tree = read_yaml(read_text(file, 1_000_000))
    if not isinstance(tree, Mapping) or "categorical_feature_sizes" not in tree:
        raise InputError(f"{file} has no categorical_feature_sizes, as a DeepSpark model's has")
    # rows beyond a table are an error here, and there are none in its data
    unknown = set(tree) - set(CONFIG_LEAVES) - {"hash_indices"}
    if unknown:
        raise InputError(f"{file}: {shown(sorted(unknown)[0])} is not known")
    return {leaf: tree[key] for key, leaf in CONFIG_LEAVES.items() if key in tree}


def model_configuration(file: str) -> GivenSections | None:
    """A DeepSpark model configuration as a run of its ``train.py`` with no other flag, None where
    the file is no such configuration; an InputError says that a value in it is not possible."""
    path = Path(file)
    if path.suffix != ".json" or not path.is_file():
        return None
    if "categorical_feature_sizes" not in read_text(path, 1_000_000):
        return None
    values = {flag.key: flag.default for flag in DEEPSPARK_FLAGS}
    values |= {"model_config": file, "dataset": "data/Criteo_Terabyte"}
    try:
        return GivenSections(PurePath(file).stem, _deepspark(values, {}))
    except InputError as error:
        raise InputError(str(error).removeprefix("--like: --model_config: ")) from None
