"""Parameters: validated sections that say everything about a run.

A parameters file (YAML) has the sections ``model``, ``data``, ``training``, a ``title``, and
those of other packages (:data:`OWNERS`). Each section is a frozen dataclass; a value that cannot
work is refused when the dataclass is built, before anything runs. What each leaf means is in
``meanings.yaml``; options of a kind of interaction, loss or optimiser are declared, explained and
checked by its class.

Sources: the model's shape and its names follow Naumov et al. 2019
(arXiv:1906.00091); defaults are those of parameters/seed.yaml, the shape of
facebookresearch/dlrm ``bench/dlrm_s_benchmark.sh``.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import (
    called,
    check_text,
    coerce_section,
    coerced,
    explained,
    option_text,
    read_yaml,
    refuse_clashes,
    setting,
    shown,
    with_meanings,
    with_options,
)
from dlrm_core.interactions import INTERACTIONS, Interaction, Weight
from dlrm_core.losses import LOSSES
from dlrm_core.optimizers import OPTIMIZERS

MEANINGS = read_yaml(Path(__file__).with_name("meanings.yaml").read_text(encoding="utf-8"))
"""What the leaves of the sections below mean, but for those that choose among kinds; and why two of
them cannot both be as they are (``clashes``)."""


@dataclass(frozen=True)
@with_options("loss", LOSSES)
@with_options("interaction", INTERACTIONS)
@with_meanings(MEANINGS["model"])
class ModelConfig:
    """Shape of the DLRM: bottom MLP, embedding tables, interaction, top MLP.

    Options of interactions and losses are leaves of it as well.
    """

    mlp_sizes: str = setting("facebook", choices=("facebook", "nvidia"))
    dense_features: int | None = setting(None, minimum=1)
    bottom_mlp: tuple[int, ...] = setting((512, 512, 64), minimum=1)
    top_mlp: tuple[int, ...] = setting((1024, 1024, 1024, 1), minimum=1)
    embedding_dim: int = setting(64, minimum=1)
    embedding_precision: str = setting("fp32", choices=("fp32", "bf16", "fp16"))
    tables: int | None = setting(8, minimum=1)
    table_rows: tuple[int, ...] = setting((1_000_000,), minimum=1)
    interaction: str = setting("dot", explained(INTERACTIONS), choices=tuple(INTERACTIONS))
    loss: str = setting("mse", explained(LOSSES), choices=tuple(LOSSES))
    loss_threshold: float = setting(0.0, minimum=0.0, maximum=1.0)
    init: str = setting("facebook", choices=("facebook", "torch"))

    def __post_init__(self) -> None:
        coerce_section(self, "model")
        rows = self.table_rows
        if self.tables is None:
            object.__setattr__(self, "tables", len(rows))
        elif len(rows) == 1:
            object.__setattr__(self, "table_rows", rows * self.tables)
        elif len(rows) != self.tables:
            raise InputError(
                f"model.tables is {self.tables}, but model.table_rows lists {len(rows)} tables"
            )
        includes_input = self.mlp_sizes == "facebook"
        if not includes_input and self.dense_features is None:
            raise InputError(
                "model.dense_features is missing: with model.mlp_sizes: nvidia "
                "model.bottom_mlp leaves the input width out, so it must be given"
            )
        if includes_input and len(self.bottom_mlp) < 2:
            raise InputError(
                f"model.bottom_mlp has {len(self.bottom_mlp)} width, expected at least 2 "
                "(input and output; model.mlp_sizes: facebook includes the input)"
            )
        if includes_input and self.dense_features not in (None, self.bottom_mlp[0]):
            raise InputError(
                f"model.dense_features is {self.dense_features}, but model.bottom_mlp "
                f"starts with {self.bottom_mlp[0]} (model.mlp_sizes: facebook includes "
                "the input width)"
            )
        if self.dense_features is None:
            object.__setattr__(self, "dense_features", self.bottom_mlp[0])
        if self.bottom_mlp[-1] != self.embedding_dim:
            raise InputError(
                f"model.bottom_mlp ends in {self.bottom_mlp[-1]}, but model.embedding_dim is "
                f"{self.embedding_dim}: the interaction needs them equal"
            )
        if self.top_mlp[-1] != 1:
            raise InputError(
                f"model.top_mlp ends in {self.top_mlp[-1]}, expected 1 (one click probability)"
            )
        for leaf, default in INTERACTIONS[self.interaction].check(self).items():
            object.__setattr__(self, leaf, default)
        for loss in LOSSES.values():
            loss.check(self)

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        """Widths of the bottom MLP, input included, whichever way they were counted."""
        assert self.dense_features is not None
        if self.mlp_sizes == "facebook":
            return self.bottom_mlp
        return (self.dense_features, *self.bottom_mlp)

    @functools.cached_property
    def interaction_kind(self) -> Interaction:
        kind = INTERACTIONS[self.interaction]
        options = {leaf: getattr(self, leaf) for leaf in kind.options}
        return kind(len(self.table_rows) + 1, self.embedding_dim, **options)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of an embedding table."""
        return self.embedding_dim * (4 if self.embedding_precision == "fp32" else 2)

    @property
    def top_widths(self) -> tuple[int, ...]:
        """Widths of the top MLP, its input, the interaction's width, included."""
        return (self.interaction_kind.width, *self.top_mlp)

    @property
    def weight_sizes(self) -> dict[str, list[int]]:
        """Numbers of each weight and bias of the dense part's parts, in the optimiser's order.

        A part without weights is not listed.
        """
        return self._sizes(self.interaction_kind.weights())

    @property
    def narrowed_sizes(self) -> dict[str, list[int]]:
        """:attr:`weight_sizes` of those weights that autocast copies in a narrow precision."""
        return self._sizes([w for w in self.interaction_kind.weights() if w.narrowed])

    def _sizes(self, of_interaction: Sequence[Weight]) -> dict[str, list[int]]:
        sizes = {
            part: [size for n, m in itertools.pairwise(widths) for size in (n * m, m)]
            for part, widths in (("bottom_mlp", self.bottom_widths), ("top_mlp", self.top_widths))
        }
        if of_interaction:
            sizes["interaction"] = [weight.size for weight in of_interaction]
        return sizes

    @property
    def dense_weights(self) -> dict[str, int]:
        """How many weights and biases each part of the dense part has."""
        return {part: sum(sizes) for part, sizes in self.weight_sizes.items()}


LAWS = ("uniform", "zipf", "reuse")
"""Generators of :class:`dlrm_core.data.synthetic.SyntheticBatches`: laws of rows alone."""


@dataclass(frozen=True)
@with_meanings(MEANINGS["data"])
class DataConfig:
    """Where batches come from."""

    generator: str = setting(
        "facebook", choices=("facebook_loop", "facebook", *LAWS, "dataset", "teacher")
    )
    path: str = setting("")
    format: str = setting("split_binary", choices=("split_binary", "deepspark_dist", "terabyte"))
    order: str = setting("sequential", choices=("sequential", "shuffled"))
    samples: int | None = setting(None, minimum=1)
    drop_last: bool = setting(True)
    teacher_seed: int = setting(1, minimum=0)
    teacher_strength: float = setting(1.38, minimum=0.0, maximum=8.0)
    teacher_rows: int = setting(64, minimum=1)
    indices_per_lookup: int = setting(100, minimum=1)
    fixed_pooling: bool = setting(False)
    multi_hot_sizes: tuple[int, ...] | None = setting(None, minimum=1)
    zipf_exponent: float = setting(1.05, minimum=0.0)
    round_targets: bool = setting(False)
    loader: str = setting("synchronous", choices=("synchronous", "prefetch"))
    prefetch_batches: int = setting(2, minimum=1)
    place: str = setting("cpu", choices=("cpu", "device"))

    def __post_init__(self) -> None:
        coerce_section(self, "data")
        refuse_clashes("data", self, self._clashes(), MEANINGS["clashes"]["data"])
        if self.one_hot or self.multi_hot_sizes is not None:
            # whatever the other laws' settings are: one row of each table a sample, or sizes given
            object.__setattr__(self, "indices_per_lookup", max(self.multi_hot_sizes or (1,)))
            object.__setattr__(self, "fixed_pooling", True)

    def _clashes(self) -> dict[str, bool]:
        lawless, dataset = self.generator not in LAWS, self.generator == "dataset"
        on_device = self.place == "device"
        return {
            "multi_hot_sizes generator": self.multi_hot_sizes is not None and lawless,
            "generator path": dataset != bool(self.path),
            "samples generator": dataset and self.samples is not None,
            "place generator": on_device and lawless,
            "place loader": on_device and self.loader == "prefetch",
        }

    @staticmethod
    def located(section: Mapping[str, Any], absolute: Callable[[str, str], str]) -> dict[str, str]:
        """The section's folders as absolute paths, ``absolute(leaf, folder)``."""
        path = section.get("path")
        return {"path": absolute("path", path)} if isinstance(path, str) and path else {}

    @property
    def one_hot(self) -> bool:
        """Every bag holds one row, as in Criteo's data."""
        return self.generator in ("dataset", "teacher")


@dataclass(frozen=True)
@with_meanings(MEANINGS["training"])
class TrainingConfig:
    """The training loop."""

    batch_size: int = setting(2048, minimum=1)
    batches: int = setting(100, minimum=1)
    epochs: float | None = setting(None, minimum=0.0)
    max_steps: int | None = setting(None, minimum=1)
    learning_rate: float = setting(0.01, minimum=0.0)
    lr_schedule: str = setting("nvidia", choices=("nvidia", "facebook"))
    lr_warmup_steps: int = setting(0, minimum=0)
    lr_decay_start: int = setting(0, minimum=0)
    lr_decay_steps: int = setting(0, minimum=0)
    lr_decay_power: float = setting(2.0, minimum=0.0)
    lr_end: float = setting(0.0, minimum=0.0)
    optimizer: str = setting(
        "sgd",
        f"of the embeddings: {explained(OPTIMIZERS)}; the dense part uses "
        + ", ".join(f"{kind.dense} with {name}" for name, kind in OPTIMIZERS.items()),
        choices=tuple(OPTIMIZERS),
    )
    dense_backend: str = setting("torch", choices=("torch", "fused", "auto"))
    embedding_backend: str = setting("torch", choices=("torch", "fused", "fbgemm", "auto"))
    embeddings_on_gpu_bytes: int | None = setting(None, minimum=0)
    sharding: str = setting(
        "auto", choices=("auto", "table_wise", "row_wise", "column_wise", "replicated")
    )
    replicated_bytes: int = setting(0, minimum=0)
    rank_timeout_s: float = setting(60.0, minimum=1.0)
    fused_optimizer: bool = setting(False)
    seed: int = setting(123, minimum=0, maximum=2**32 - 1)
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    threads: int | None = setting(None, minimum=1, maximum=1024)
    fp32_matmul: str = setting("default", choices=("default", "onednn", "bf16x2", "bf16x3", "auto"))
    tf32: bool = setting(False)
    precision: str = setting("fp32", choices=("fp32", "bf16", "fp16"))
    loss_scale: float = setting(65536.0, minimum=1.0)
    skip_overflow: bool = setting(True)
    lowest_precision: str = setting("bf16", choices=("fp32", "bf16", "fp16"))
    micro_batch: int | None = setting(None, minimum=1)
    compile: bool = setting(False)
    cuda_graphs: bool = setting(False)
    log_every: int = setting(10, minimum=1)
    eval_every: int | None = setting(None, minimum=1)
    evals_per_epoch: int | None = setting(None, minimum=1)
    eval_batches: int | None = setting(None, minimum=1)
    auc_target: float | None = setting(None, minimum=0.0, maximum=1.0)
    checkpoint_every: int | None = setting(None, minimum=1)
    checkpoint_folder: str = setting("")
    keep_checkpoints: int = setting(2, minimum=1)
    resume: str = setting("")

    def __post_init__(self) -> None:
        coerce_section(self, "training")
        refuse_clashes("training", self, self._clashes(), MEANINGS["clashes"]["training"])

    def _clashes(self) -> dict[str, bool]:
        decays, begin, warmup = self.lr_decay_steps > 0, self.lr_decay_start, self.lr_warmup_steps
        facebook, graphs = self.lr_schedule == "facebook", self.cuda_graphs
        fused, engines = self.dense_backend == "fused", OPTIMIZERS[self.optimizer].engines
        updates_tables = {"fused": "fused embeddings", "fbgemm": "FBGEMM"}
        backend = updates_tables.get(self.embedding_backend)
        both_evaluate = self.evals_per_epoch is not None and self.eval_every is not None
        return {
            "lr_decay_start lr_decay_steps": begin > 0 and not decays,
            "lr_decay_start lr_warmup_steps": decays and begin < warmup,
            "lr_end learning_rate": decays and self.lr_end > self.learning_rate,
            "lr_schedule lr_decay_power": facebook and self.lr_decay_power != 2.0,
            "lr_schedule lr_end": facebook and self.lr_end > 0,
            "lr_schedule lr_warmup_steps": facebook and decays and warmup < 2 and begin > 1,
            "optimizer embedding_backend": backend is not None and backend not in engines,
            "fp32_matmul dense_backend": self.fp32_matmul.startswith("bf16") and not fused,
            "dense_backend compile": fused and self.compile,
            "cuda_graphs compile": graphs and self.compile,
            "cuda_graphs micro_batch": graphs and self.micro_batch is not None,
            "cuda_graphs precision": graphs and self.precision == "fp16",
            "eval_every evals_per_epoch": both_evaluate,
        }


SECTIONS: dict[str, type] = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig}
"""The core's sections, and those of :data:`OWNERS` that are installed."""

OWNERS = {"profiling": ("dlrm_workbook.ground.profiling", "ProfilingConfig")}
"""Sections of other packages: module and dataclass, found by name. Where a package is missing, its
section is kept as the file has it."""

NAMES = ("model", "data", "training", *OWNERS)
"""All sections, also of packages that are not installed."""

for _name, (_module, _class) in OWNERS.items():
    with contextlib.suppress(ModuleNotFoundError):
        SECTIONS[_name] = getattr(importlib.import_module(_module), _class)


@dataclass(frozen=True)
class Parameters:
    """A whole run: its sections, a title, and the file they came from."""

    title: str = "DLRM"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    profiling: Any = field(default_factory=SECTIONS.get("profiling", dict))
    """The workbook's; without it what the file has."""
    source: str = ""
    sweep: Mapping[str, Any] = field(default_factory=dict)
    """Leaves and the values that the workbook gives them in turn; it checks them."""

    def __post_init__(self) -> None:
        sizes, tables = self.data.multi_hot_sizes, len(self.model.table_rows)
        if sizes is not None and len(sizes) != tables:
            raise InputError(
                f"data.multi_hot_sizes has {len(sizes)} sizes, but the model has {tables} tables"
            )
        if self.model.embedding_precision != "fp32":
            self._require_rounding()
        samples, size = self.data.samples, self.training.batch_size
        if samples is not None and samples < size and self.data.drop_last:
            raise InputError(
                f"data.samples is {samples}, but training.batch_size is {size}: not one full "
                "batch (data.drop_last: false trains on a short one)"
            )

    def _require_rounding(self) -> None:
        """Refuse an optimiser or a back end that cannot round rows of 2 bytes a number."""
        reasons = {"optimizer": OPTIMIZERS[self.training.optimizer].why_no_rounding}
        if self.training.embedding_backend == "fbgemm":
            reasons["embedding_backend"] = (
                "its kernels do not round as a resumed run must; choose torch, fused or auto"
            )
        for leaf, why in reasons.items():
            if why:
                raise InputError(
                    f"model.embedding_precision is {self.model.embedding_precision!r}, but "
                    f"training.{leaf} is {getattr(self.training, leaf)!r}: {why}"
                )

    def with_training(self, **leaves: Any) -> Parameters:
        """The same parameters with other values of some leaves of ``training``."""
        return replace(self, training=replace(self.training, **leaves))

    def to_sections(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars: what YAML, JSON and papermill carry."""
        sections: dict[str, Any] = {"title": self.title}
        for name in NAMES:
            section = getattr(self, name)
            leaves = asdict(section) if name in SECTIONS else section
            sections[name] = {
                leaf: list(value) if isinstance(value, tuple) else value
                for leaf, value in leaves.items()
            }
        return sections

    @property
    def preset(self) -> str:
        """Short name for folders: the file's stem, or 'parameters'."""
        return Path(self.source).stem if self.source else "parameters"


def mean_bag_size(parameters: Parameters, table: int) -> float:
    """Expected indices per bag of a table, before facebook's deduplication."""
    data, rows = parameters.data, parameters.model.table_rows[table]
    if data.multi_hot_sizes is not None:
        return float(data.multi_hot_sizes[table])
    if data.fixed_pooling:
        return float(data.indices_per_lookup)
    bound = min(rows, data.indices_per_lookup)
    # max(1, round(r k)), r ~ U[0,1): each of 2 to k-1 by 1/k, k by half of that, 1 by the rest
    return bound / 2 + 1 / (2 * bound)


@dataclass(frozen=True)
class GivenSections:
    """Sections of parameters that come from no file, and the name that stands for a file's."""

    name: str
    tree: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name


def load_parameters(
    path: str | os.PathLike[str] | GivenSections | None, overrides: Sequence[str] = ()
) -> Parameters:
    """Read and validate a parameters file.

    Args:
        path: a YAML file, the name of one in :data:`PRESETS` (``seed``, ``seed.yaml``), or
            sections in its place; None for defaults and overrides alone.
        overrides: ``section.leaf=value`` each; the value is read as YAML.
    """
    tree: dict[str, Any] = {}
    if isinstance(path, GivenSections):
        tree = copy.deepcopy(dict(path.tree))
    elif path is not None:
        tree = _read_sections(preset_file(path))
    for override in overrides:
        _override(tree, override)
    for name, kind in SECTIONS.items():
        section = tree.get(name)
        if isinstance(section, dict) and hasattr(kind, "located"):
            # notebooks run in folders of their own
            absolute = functools.partial(_absolute, f"{path}: {name}")
            tree[name] = section | kind.located(section, absolute)
    parameters = parameters_from_sections(tree, source=str(path or ""))
    for override in overrides:
        name = override.partition("=")[0].strip()
        section, _, leaf = name.partition(".")
        if section in SECTIONS and name not in RETIRED:
            require_effect(parameters, name, tree[section].get(leaf), option_text(override))
    return parameters


def require_effect(parameters: Parameters, name: str, typed: Any, where: str) -> None:
    """Refuse a value that another one of its section, such as a file's, replaces in silence.

    ``parameters`` have the value, which was ``typed`` for the leaf ``name``; ``where`` says the
    place.
    """
    if typed is None:
        return
    section, _, leaf = name.partition(".")
    settings = getattr(parameters, section)
    value = getattr(settings, leaf)
    decides = f"other values of {section} make it {shown(value)}"
    # where one leaf merely comes first, both keep their values
    if (section, leaf) == ("training", "batches"):
        first = "epochs" if settings.epochs is not None else "max_steps"
        most = getattr(settings, first)
        replaced = most is not None and (first == "epochs" or value > most)
        decides = f"training.{first} is {most} and comes first; add -p training.{first}=null"
    else:
        metadata = type(settings).__dataclass_fields__[leaf].metadata
        wanted = coerced(typed, get_type_hints(type(settings))[leaf], name, metadata)
        if isinstance(wanted, tuple) and len(wanted) == 1:
            wanted *= len(value)  # one for all, as rows of tables
        replaced = wanted != value and not isinstance(value, str)  # a path became an absolute one
    if replaced:
        raise InputError(f"{where}: {name} does nothing: {decides}")


PRESETS = (Path(__file__).parent / "parameters").resolve()
"""Folder of the parameters files that come with the package; in a checkout its ``parameters/``."""


def preset_file(given: str | os.PathLike[str]) -> Path:
    """The parameters file that a user named: a path, or a name of :data:`PRESETS` without folder.

    A file of that name in the current folder comes first. Raises InputError if there is no file of
    a name without folder, here or there.
    """
    path = Path(given)
    if path.parent != Path() or os.path.lexists(path):
        return path
    ours = PRESETS / f"{path.name.removesuffix('.yaml')}.yaml"
    if not ours.is_file():
        known = ", ".join(sorted(file.stem for file in PRESETS.glob("*.yaml")))
        raise InputError(
            f"{path}: no such file, and none of that name comes with the package; known: {known}"
        )
    return ours


def _absolute(section: str, leaf: str, folder: str) -> str:
    try:
        return str(Path(folder).expanduser().absolute())
    except RuntimeError:
        raise InputError(f"{section}.{leaf} is {shown(folder)}: no such user's folder") from None


def _read_sections(path: Path) -> dict[str, Any]:
    from dlrm_core.base.files import read_text

    text = read_text(path, MOST_BYTES)
    if not text:
        raise InputError(f"{path}: the file is empty (0 bytes); for defaults alone write {{}}")
    with _naming(path):
        tree = read_yaml(text)
    if not isinstance(tree, dict | None):
        raise InputError(
            f"{path} is {shown(tree)}, expected the sections title, {', '.join(NAMES)}"
        )
    return tree or {}


@contextlib.contextmanager
def _naming(source: object) -> Iterator[None]:
    """Name the file or the option in front of what is refused inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}" if source else str(error)) from None


MOST_BYTES = 1_000_000
"""Size limit of a parameters file; the largest of ours has 3,000."""

RETIRED: dict[str, Any] = {"training.tables_on_disk": "", "training.embedding_update": "race_free"}
RETIRED |= {"training.interleave_memory": False}
"""Parameters of earlier versions, which their records hold, and the value that does nothing."""


def parameters_from_sections(tree: Mapping[str, Any], source: str = "") -> Parameters:
    """Validate sections given as dicts, as papermill injects them."""
    with _naming(source):
        title = tree.get("title", "DLRM")
        if not isinstance(title, str):
            raise InputError(f"title is {shown(title)}, expected text")
        check_text(title, "title")
        data, model = tree.get("data", {}), {} if tree.get("model") is None else tree["model"]
        of_files = isinstance(data, Mapping) and data.get("generator") == "dataset"
        if of_files and isinstance(model, Mapping) and model.get("table_rows") is None:
            from dlrm_core.data.files.spec import with_stated_shape

            tree = {**tree, "model": with_stated_shape(model, data)}
        built = {name: _section(name, given) for name, given in tree.items() if name != "title"}
        return Parameters(title=title, source=source, **built)


def _section(name: str, given: Any) -> Any:
    """A section as its dataclass; of a package that is not installed as it is given."""
    section = _known(name, given if isinstance(given, Mapping) else {})
    if not isinstance(given, Mapping | None):
        what = "parameters, each with a list of values" if name == "sweep" else "a section"
        raise InputError(f"{name} is {shown(given)}, expected {what}")
    if name == "model" and isinstance(section.get("table_rows"), list | tuple):
        section.setdefault("tables", None)  # a list of rows without a count: the list decides
    return SECTIONS[name](**section) if name in SECTIONS else section


def _known(name: Any, leaves: Mapping[Any, Any]) -> dict[Any, Any]:
    """The leaves of a section without retired ones; refuses what is no section, or no leaf."""
    if name not in (*NAMES, "sweep"):
        raise InputError(unknown_name(name, ["title", *NAMES, "sweep"], "section"))
    full = {leaf: f"{name}.{called(leaf)}" for leaf in leaves}
    left = {k: value for k, value in leaves.items() if (full[k], value) not in RETIRED.items()}
    if name in SECTIONS:
        known = {f.name: f"{name}.{f.name}" for f in fields(SECTIONS[name])}
        for leaf in left:
            if leaf not in known:
                raise InputError(unknown_name(full[leaf], [*known.values()], "parameter"))
    return left


def _override(tree: dict[str, Any], override: str) -> None:
    """Apply one ``section.leaf=value`` to a tree of sections."""
    name, equals, text = override.partition("=")
    section, dot, leaf = name.strip().partition(".")
    if not equals or (not dot and section not in ("title", "sweep")):
        raise InputError(
            f"{option_text(override)}: expected NAME=VALUE with a NAME such as training.batch_size"
        )
    if section == "title":
        tree["title"] = text
        return
    with _naming(option_text(override)):
        value = read_yaml(text)
        _known(section, {leaf: value} if dot else {})
    if not dot:  # the leaves are those of other sections; the workbook checks them
        tree[section] = value
        return
    if tree.get(section) is None:
        tree[section] = {}
    if isinstance(tree[section], dict):
        tree[section][leaf] = value


def unknown_name(name: Any, known: Sequence[str], what: str = "parameter") -> str:
    """A sentence about a name that is none of those known, with the one that was meant, if any.

    A parameter that another section has is the one meant.
    """
    short = called(name)
    leaf = short.rpartition(".")[2]
    close = [
        f"{section}.{leaf}"
        for section, kind in SECTIONS.items()
        if what == "parameter" and leaf in [field.name for field in fields(kind)]
    ]
    close = close or difflib.get_close_matches(short, known, n=1, cutoff=0.5)
    hint = f"known: {', '.join(known)}" if len(known) < 10 else "`dlrm parameters` lists them all"
    hint = f"did you mean {close[0]}?" if close else hint
    return f"unknown {what} {short}; {hint}"
