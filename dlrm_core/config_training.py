"""The sections ``training`` and ``profiling`` of a parameters file, see :mod:`dlrm_core.config`."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_core.errors import InputError
from dlrm_core.settings import coerce_section, setting


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop."""

    batch_size: int = setting(2048, "samples per iteration", minimum=1)
    batches: int = setting(100, "iterations", minimum=1)
    epochs: float | None = setting(
        None,
        "passes over the training data instead of a number of batches; needs a data set, since "
        "generated streams have no end",
        minimum=0.0,
    )
    max_steps: int | None = setting(
        None, "end after so many iterations, whatever batches or epochs say", minimum=1
    )
    learning_rate: float = setting(
        0.01, "step size, of embeddings and dense part alike", minimum=0.0
    )
    lr_warmup_steps: int = setting(
        0, "iterations W in which the learning rate rises in a line from 0", minimum=0
    )
    lr_decay_start: int = setting(0, "iteration D from which the learning rate decays", minimum=0)
    lr_decay_steps: int = setting(
        0,
        "iterations N over which it decays: learning_rate ((D+N-s)/N)^power in iteration s, "
        "lr_end after that; 0: no decay",
        minimum=0,
    )
    lr_decay_power: float = setting(2.0, "power of the decay", minimum=0.0)
    lr_end: float = setting(0.0, "learning rate below which the decay does not go", minimum=0.0)
    optimizer: str = setting(
        "sgd",
        "of the embeddings: plain 'sgd', 'adagrad', 'rowwise_adagrad' (one accumulator a row), or "
        "'adam' (of the rows looked up only, torch's SparseAdam); the dense part uses SGD with "
        "sgd, Adam with adam, Adagrad with both others",
        choices=("sgd", "adagrad", "rowwise_adagrad", "adam"),
    )
    dense_backend: str = setting(
        "torch",
        "code of MLPs and interaction: 'torch', or on a CPU with bf16 matrix tiles (Intel AMX) "
        "'fused': kernels of our own, with precision: bf16, or fp32 and fp32_matmul: bf16x2 or "
        "bf16x3; on a GPU 'fused' is the interaction as one Triton kernel, and matrix products "
        "padded to what tensor cores want",
        choices=("torch", "fused"),
    )
    embedding_backend: str = setting(
        "torch",
        "code of lookups and table updates: 'torch': EmbeddingBag and torch's optimisers, a call "
        "a table; 'fused': one call for all tables, the update inside backward; 'fbgemm': FBGEMM's "
        "(where installed); 'auto': whichever is fastest on the run's own tables and first batches",
        choices=("torch", "fused", "fbgemm", "auto"),
    )
    embedding_update: str = setting(
        "race_free",
        "with fused on the CPU and SGD, how threads share the update: 'race_free' (each row has "
        "one owner), 'naive' (a sparse gradient applied by one thread), 'atomic' (atomic adds), "
        "'locked' (a lock a row); the last three are for studying contention",
        choices=("race_free", "naive", "atomic", "locked"),
    )
    embeddings_on_gpu_bytes: int | None = setting(
        None,
        "bytes of embedding tables that may lie on the GPU, smallest tables first; the others "
        "stay in host memory and are looked up by the CPU; left out, all lie on the GPU",
        minimum=0,
    )
    tables_on_disk: str = setting(
        "",
        "folder on a disk from which the tables on the host are mapped, for tables larger than "
        "the host's memory; scratch: removed when the run ends",
    )
    sharding: str = setting(
        "auto",
        "under torchrun, how embedding tables are divided among the ranks by TorchRec: "
        "'table_wise' (a rank has whole tables), 'row_wise', 'column_wise' (each table cut up), "
        "'replicated' (every rank has all), 'auto' (its planner chooses)",
        choices=("auto", "table_wise", "row_wise", "column_wise", "replicated"),
    )
    replicated_bytes: int = setting(
        0,
        "under torchrun: tables of at most so many bytes are replicated, whatever sharding says",
        minimum=0,
    )
    rank_timeout_s: float = setting(
        60.0,
        "under torchrun: the run ends, naming the rank, when one gives no sign of life or keeps "
        "the others waiting for so many seconds",
        minimum=1.0,
    )
    fused_optimizer: bool = setting(
        False, "one fused kernel for the dense weights' update instead of one call a tensor"
    )
    seed: int = setting(123, "seed of weights and data", minimum=0, maximum=2**32 - 1)
    device: str = setting(
        "auto",
        "'cpu', 'cuda', or 'auto': CUDA when there is a GPU",
        choices=("auto", "cpu", "cuda"),
    )
    threads: int | None = setting(
        None, "CPU threads of one operator; left out, torch's own choice", minimum=1, maximum=1024
    )
    fp32_matmul: str = setting(
        "default",
        "fp32 matrix products on the CPU: 'default' (MKL); 'onednn', faster on AMD, its error is "
        "checked before training; with dense_backend: fused on a CPU with bf16 matrix tiles "
        "(Intel AMX) 'bf16x2' or 'bf16x3', sums of two or three bf16 numbers: relative error "
        "5e-6, or fp32's own; where they cannot run, onednn",
        choices=("default", "onednn", "bf16x2", "bf16x3"),
    )
    tf32: bool = setting(
        False, "on a GPU: round the inputs of fp32 products to TF32 (10 bits of mantissa)"
    )
    precision: str = setting(
        "fp32",
        "of the dense part's products and activations (autocast); embeddings, all weights and "
        "their update stay fp32",
        choices=("fp32", "bf16", "fp16"),
    )
    loss_scale: float = setting(
        65536.0,
        "with fp16: the loss is multiplied by it before backward, gradients are divided by it; "
        "a step whose gradients overflow is skipped and counted",
        minimum=1.0,
    )
    lowest_precision: str = setting(
        "bf16",
        "the lowest precision of matrix products that the model's accuracy allows; findings "
        "propose none below it",
        choices=("fp32", "bf16", "fp16"),
    )
    micro_batch: int | None = setting(
        None,
        "rows of the dense part computed at a time, their gradients added up (same loss): for "
        "batches whose activations outgrow the cache; left out, the whole batch",
        minimum=1,
    )
    compile: bool = setting(
        False, "torch.compile of MLPs and interaction; needs a C++ compiler, on a GPU Triton"
    )
    cuda_graphs: bool = setting(
        False,
        "on a GPU: the whole step as CUDA graphs, one launch a part and phase; needs "
        "embedding_backend: fused",
    )
    log_every: int = setting(10, "iterations per line of metrics.jsonl", minimum=1)
    eval_every: int | None = setting(
        None,
        "iterations between evaluations on the test data; left out, none but the one at the end "
        "that auc_target asks for",
        minimum=1,
    )
    eval_batches: int | None = setting(
        None,
        "batches of an evaluation; left out, the whole test split of a data set, 131,072 samples "
        "of a teacher, 20 batches of other streams",
        minimum=1,
    )
    auc_target: float | None = setting(
        None, "end the run when an evaluation reaches this AUC", minimum=0.0, maximum=1.0
    )
    checkpoint_every: int | None = setting(
        None, "iterations between checkpoints; left out, none but one at the end", minimum=1
    )
    checkpoint_folder: str = setting(
        "",
        "where checkpoints go, one folder each; left out, with checkpoint_every: the folder "
        "'checkpoint' of the run's own folder",
    )
    keep_checkpoints: int = setting(
        2, "checkpoints kept; older ones are removed once a newer one is whole", minimum=1
    )
    resume: str = setting(
        "",
        "go on from a checkpoint: its folder, a folder of checkpoints (its newest), or 'latest' "
        "(the newest of checkpoint_folder; none yet: from the beginning)",
    )

    def __post_init__(self) -> None:
        coerce_section(self, "training")
        self._check_schedule()
        if self.optimizer == "adam" and self.embedding_backend not in ("torch", "auto"):
            raise InputError(
                f"training.optimizer is 'adam', but training.embedding_backend is "
                f"{self.embedding_backend!r}: Adam of the rows looked up exists in 'torch' only"
            )
        if self.embedding_update != "race_free":
            where = f"training.embedding_update is {self.embedding_update!r}, but "
            if self.embedding_backend != "fused":
                raise InputError(
                    f"{where}training.embedding_backend is {self.embedding_backend!r}: only "
                    "'fused' has more than one update"
                )
            if self.optimizer != "sgd":
                raise InputError(
                    f"{where}training.optimizer is {self.optimizer!r}: an Adagrad needs a row's "
                    "whole gradient, so only 'race_free' can do it; the others are for 'sgd'"
                )
        if self.tables_on_disk and self.embedding_backend == "fbgemm":
            raise InputError(
                f"training.tables_on_disk is {self.tables_on_disk!r}, but "
                "training.embedding_backend is 'fbgemm', which keeps tables in memory of its "
                "own: choose torch or fused"
            )
        if self.fp32_matmul.startswith("bf16") and self.dense_backend != "fused":
            raise InputError(
                f"training.fp32_matmul is {self.fp32_matmul!r}, but training.dense_backend is "
                f"{self.dense_backend!r}: only 'fused' has such products"
            )
        if self.dense_backend == "fused" and self.compile:
            raise InputError(
                "training.dense_backend is 'fused', but training.compile is true as well: both "
                "replace the parts' kernels; choose one of them"
            )
        if self.cuda_graphs and self.micro_batch is not None:
            raise InputError(
                f"training.cuda_graphs is true, but training.micro_batch is {self.micro_batch}: "
                "micro-batches keep activations in a CPU's cache, graphs are for a GPU, and what "
                "adds up the former is not captured; choose one of them"
            )
        if self.cuda_graphs and self.precision == "fp16":
            raise InputError(
                "training.cuda_graphs is true, but training.precision is 'fp16': whether a step "
                "whose gradients overflow is skipped is the host's to decide; choose bf16"
            )
        if self.cuda_graphs and self.compile:
            raise InputError(
                "training.cuda_graphs is true, but training.compile is true as well: both "
                "replace the parts' kernels; choose one of them"
            )

    def _check_schedule(self) -> None:
        decays = self.lr_decay_steps > 0
        if self.lr_decay_start and not decays:
            raise InputError(
                f"training.lr_decay_start is {self.lr_decay_start}, but training.lr_decay_steps "
                "is 0: a decay needs at least 1 iteration"
            )
        if decays and self.lr_decay_start < self.lr_warmup_steps:
            raise InputError(
                f"training.lr_decay_start is {self.lr_decay_start}, but training.lr_warmup_steps "
                f"is {self.lr_warmup_steps}: the warm-up must end before the decay starts"
            )
        if decays and self.lr_end > self.learning_rate:
            raise InputError(
                f"training.lr_end is {self.lr_end:g}, but training.learning_rate is "
                f"{self.learning_rate:g}: the decay must not end above its beginning"
            )


@dataclass(frozen=True)
class ProfilingConfig:
    """How the run is measured."""

    engine: str = setting(
        "auto",
        "'torch': torch.profiler; 'hpctoolkit': hpcrun, hpcstruct, hpcprof; 'auto': HPCToolkit "
        "when hpcrun is found, else torch (the page says which); 'both': HPCToolkit and then "
        "torch, side by side",
        choices=("auto", "torch", "hpctoolkit", "both"),
    )
    warmup: int = setting(3, "iterations before measuring", minimum=0)
    iterations: int = setting(20, "iterations measured", minimum=1)
    record_shapes: bool = setting(True, "torch: operator input shapes")
    profile_memory: bool = setting(True, "torch: allocations per operator")
    with_stack: bool = setting(False, "torch: Python call stacks (larger traces, more overhead)")
    hpctoolkit_home: str = setting(
        "", "folder of an HPCToolkit installation; empty: HPCTOOLKIT_HOME, then PATH"
    )
    python_frames: bool = setting(
        True, "HPCToolkit: Python frames in call paths (-a python), where it offers them"
    )
    pc_sampling: bool = setting(
        True, "HPCToolkit on a GPU: a second pass with PC sampling for stall reasons"
    )
    structure: bool = setting(
        True, "HPCToolkit: recover loops and inlining with hpcstruct before hpcprof"
    )
    structure_limit_mb: int = setting(
        64, "HPCToolkit: hpcstruct skips binaries larger than this (said in the page)", minimum=1
    )
    probes: bool = setting(
        True,
        "before measuring, time what this machine can do at best (products, bandwidth, random "
        "rows, launches) and what alternatives to each part take; false leaves both out",
    )
    timeout_s: int = setting(3600, "seconds after which one measured run is ended", minimum=1)

    def __post_init__(self) -> None:
        coerce_section(self, "profiling")
