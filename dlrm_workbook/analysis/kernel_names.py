"""Names of GPU kernels that a person can tell apart, and the arithmetic that names tell of.

A kernel's name is a C++ function with its template arguments, several hundred characters, or
what a library generated: ``void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>``.
What it does stands in the function, in the functor that it was made for (elementwise kernels,
reductions), or in the words of a generated name (matrix products, collectives, Triton).
:func:`kernel_name` reads those by general rules; the full name stays what kernels are kept
apart by.

Matrix products: ``s16816gemm`` multiplies on tensor cores by their instruction of shape 16x8x16
(PTX ISA, ``mma``), ``sgemm`` and ``simt`` without; the types in a name are its operands'.
CUTLASS's names are those of its generator (``cutlass_library``), cuBLAS's and cuDNN's follow
them; ``nvjet_tst`` is cuBLAS's for Hopper and later with letters for the operands' types.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""What words in names mean, table by table."""

LONGEST_NAME = 60
"""Characters of a short name."""


@dataclass(frozen=True)
class KernelName:
    """What the name of a kernel says."""

    short: str
    """At most :data:`LONGEST_NAME` characters: ``cutlass tf32 tensorop gemm 64x64 nt``."""
    detail: str = ""
    """What tells it from others of the same short name: ``32x6, align1``."""
    precision: str = ""
    """Of the operands of a matrix product: ``fp32``, ``tf32``, ...; "" where unknown."""
    tensor_cores: bool | None = None
    """Whether a matrix product runs on tensor cores; None where the name does not say."""
    is_product: bool = False
    """Whether it multiplies matrices, as far as the name tells."""


@functools.lru_cache(maxsize=20_000)
def computes_in_double(full: str) -> bool:
    """Whether a kernel's data are float64, by the type of its functor or of what its pointers point
    to; a scalar argument (a learning rate, the bounds of random numbers) is no data."""
    text = _demangled(full.strip())
    if re.search(r"\bdouble\d?\s*(?:const\s*)?[*&]", text):
        return True
    if re.search(r"(?<![a-zA-Z])dgemm|Dgemm|(?i:_f64|_d884|float64)", text):
        return not re.search(r"fp[48]|float8|bf16|bfloat16|e[45]m[23]", text, re.I)
    base, _, arguments = _pieces(_signature(text), "::")[-1].partition("<")
    made_for = any(pattern.search(base) for pattern, _ in _FAMILIES)
    return (_type(arguments) if made_for else _floating(arguments)) == "fp64"


WHOLE_GRAPH = "CUDA graph "
"""How the name of a graph begins that was recorded as one kernel."""


@functools.lru_cache(maxsize=20_000)
def kernel_name(full: str) -> KernelName:
    """What the full name of a kernel says; never fails, an unknown one is put in words."""
    if full.startswith(WHOLE_GRAPH):
        return KernelName(full)
    text = _demangled(full.strip())
    rules = (_copied, _triton, _collective, _product, _attention, _function)
    return _cut(next(name for rule in rules if (name := rule(text)) is not None))


def short_names(full: Iterable[str]) -> dict[str, str]:
    """Full names to short ones, of which no two are alike.

    Kernels of one short name are told apart by their details (block sizes, types), and where
    those are alike too, by a number in the order in which they come.
    """
    names = list(dict.fromkeys(full))
    short = {name: kernel_name(name).short for name in names}
    for name in _repeated(short):
        detail = kernel_name(name).detail
        short[name] = _shortened(_joined((short[name], detail), ", "))
    counts: Counter[str] = Counter()
    for name in _repeated(short):
        counts[short[name]] += 1
        number = f" #{counts[short[name]]}"
        short[name] = _shortened(short[name], LONGEST_NAME - len(number)) + number
    return short


def kernel_family(full: str) -> str:
    """The short name without sizes, layouts and what follows: ``volta sgemm``."""
    return _SIZES.split(kernel_name(full).short)[0]


_SIZES = re.compile(r" #\d+| \w*\d+x\w*\d\w*")


def _repeated(short: dict[str, str]) -> list[str]:
    counts = Counter(short.values())
    return [name for name in short if counts[short[name]] > 1]


def _cut(name: KernelName) -> KernelName:
    short = _shortened(name.short.strip() or "unnamed kernel")
    return replace(name, short=short, detail=_shortened(name.detail, 40))


def _joined(words: Iterable[str | None], between: str = " ") -> str:
    """The words that there are, as one text."""
    return between.join(filter(None, words))


def _shortened(text: str, limit: int = LONGEST_NAME) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip(" ,_") + "…"


# ---- C++ --------------------------------------------------------------------------------

_CAST = re.compile(r"\((?:unsigned )?(?:int|long|short|char|bool)\)(?=-?\d)")
_INSTANCE = re.compile(r"\[lambda\(([^()]*)\) \(instance (\d+)\)\]")
"""Values and lambdas as Nsight Systems writes them: ``(int)4``, ``[lambda(int) (instance 1)]``."""

_UNNAMED = re.compile(r"\(anonymous namespace\)::|\{anonymous\}::|<unnamed>::|\(anonymous class\)")
_CLONE = re.compile(r"\s*\[clone [^\]]*\]|\.kd$|\.intern\.\d+|^static |^__global__ ")
_RETURNS = re.compile(r"^(void|std::enable_if<.*?>::type) ")
_OPENING, _CLOSING = "<([{", ">)]}"


def _by_spelling(table: Mapping[str, str]) -> dict[str, str]:
    return {word: called for called, words in table.items() for word in words.split()}


_TYPES = _by_spelling(WORDS["types"])
_LIBRARIES = _by_spelling(WORDS["libraries"])
_WRAPPERS = frozenset(WORDS["wrappers"].split())
_NOISE = frozenset(WORDS["noise"].split())
_PHRASES = [(re.compile(rf"\b{pattern}\b"), words) for pattern, words in WORDS["phrases"].items()]
_FAMILIES = [(re.compile(pattern, re.I), family) for pattern, family in WORDS["families"].items()]
_FBGEMM = re.compile(r"split_embedding|dense_embedding_codegen|bounds_check_indices|permute_pooled")
_BARE = ("copy", "fill", "index", "cat", "arange")
"""What needs no family before it: ``copy``, not ``elementwise copy``."""

_LENGTH = re.compile(r"(?<![\dS])(?<!L[a-z])(?<!L[a-z]n)[1-9]\d{0,3}")
"""Of an identifier in a mangled name; numbers behind ``L`` and a type are values."""


def _demangled(full: str) -> str:
    """A mangled name (``_ZN2at6native15CUDAFunctor_addIfEE...``) as a function and the
    identifiers of its template arguments; other names as CUPTI writes them."""
    begun = re.match(r"_ZN?[KL]?(?=\d)", full)
    if not begun:
        return _INSTANCE.sub(r"{lambda(\1)#\2}", _CAST.sub("", full))
    path: list[str] = []
    arguments: list[str] = []
    rest, nested = full[begun.end() :], begun[0].startswith("_ZN")
    while length := _LENGTH.search(rest):
        # the path is what stands side by side; what lies behind are arguments
        inside = length.start() == 0 and not arguments and (nested or not path)
        size = int(length[0])
        word = rest[length.end() : length.end() + size]
        rest = rest[length.end() :]
        if len(word) == size and re.fullmatch(r"[A-Za-z_]\w*", word):
            rest = rest[size:]
            if not word.startswith("_GLOBAL__N"):
                (path if inside else arguments).append(word)
    return "::".join(path) + (f"<{', '.join(arguments)}>" if arguments else "") or full


def _pieces(text: str, separator: str) -> list[str]:
    """A text cut at a separator that stands outside all brackets."""
    pieces, depth, begin = [], 0, 0
    for place, sign in enumerate(text):
        if sign in _OPENING:
            depth += 1
        elif sign in _CLOSING:
            depth = max(depth - 1, 0)
        elif not depth and text.startswith(separator, place) and place >= begin:
            pieces.append(text[begin:place].strip())
            begin = place + len(separator)
    return [*pieces, text[begin:].strip()]


def _signature(text: str) -> str:
    """The path of a function and its template arguments: neither its type nor its parameters."""
    text = _RETURNS.sub("", _CLONE.sub("", _UNNAMED.sub("", text)))
    depth, begin = 0, 0
    for place, sign in enumerate(text):
        if sign == "(" and not depth and place > begin and not text[:place].endswith("operator"):
            return text[begin:place]
        if sign in _OPENING:
            depth += 1
        elif sign in _CLOSING:
            depth = max(depth - 1, 0)
        elif sign == " " and not depth:
            begin = place + 1
    return text[begin:] or text


_INDEX_LAMBDA = re.compile(r"(?<=\))::\{lambda\(int(?:, bool)?\)#\d+\}")
"""What torch wraps a functor in where elements are reached by an index: no type of the data."""


def _type(text: str) -> str:
    """The type that a functor works on: of its last lambda's parameters, else the first named; a
    floating-point one goes before the sizes and conditions that stand beside it."""
    text = _INDEX_LAMBDA.sub("", text)
    parameters = re.findall(r"lambda\(([^()]+)\)", text)
    if opaque := re.search(r"OpaqueType<(\d+)", text):
        return f"{opaque[1]}-byte"  # of any type: the char* of its lambda says no more
    words = re.findall(r"[A-Za-z_]\w*", parameters[-1] if parameters else text)
    kinds = [_TYPES[word.lstrip("_")] for word in words if word.lstrip("_") in _TYPES]
    return (_floating(parameters[-1]) if parameters else "") or next(iter(kinds), "")


def _floating(text: str) -> str:
    """The first floating-point type in template arguments: sizes and indices are integers."""
    kinds = (_TYPES.get(word.lstrip("_"), "") for word in re.findall(r"[A-Za-z_]\w*", text))
    return next((kind for kind in kinds if kind in ("fp32", "fp64", "fp16", "bf16")), "")


def _words(identifier: str) -> list[str]:
    """``CUDAFunctor_add`` is ``add``, ``indexSelectLargeIndex`` four words."""
    text = re.sub(r"^CUDAFunctorOn(?:Other|Self)_(\w+)", r"\1_scalar", identifier)
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", " ", text)
    text = re.sub(r"(?<=[A-Z])(?=[A-Z][a-z])", " ", text)
    words = re.split(r"[_\s]+", text)
    return [
        word if word.isupper() and len(word) > 1 and word != "CUDA" else word.lower()
        for word in words
        if word and word.lower() not in _NOISE and word not in ("Ops", "Op")
    ]


def _spoken(words: Iterable[str]) -> str:
    text = " ".join(words)
    for pattern, phrase in _PHRASES:
        text = pattern.sub(phrase, text)
    return re.sub(r"\s+", " ", text).strip()


def _informative(text: str, most: int) -> list[str]:
    """The first identifiers of template arguments that say what is done."""
    found = dict.fromkeys(name.strip("_") for name in re.findall(r"[A-Za-z_]\w*", text))
    known = _WRAPPERS | _TYPES.keys()
    telling = (
        name
        for name in found
        if name not in known and not name.startswith(("CUB_", "TensorList")) and _words(name)
    )
    return list(itertools.islice(telling, most))


def _function(text: str) -> KernelName:
    """A C++ function: its words, or those of the functor that it was made for."""
    signature = _signature(text)
    path = _pieces(signature, "::")
    if path[-1].startswith("operator") and len(path) > 1:
        path = path[:-1]
    base, _, rest = path[-1].partition("<")
    arguments = rest.rpartition(">")[0] or rest
    library = next((_LIBRARIES[name] for name in path[:-1] if name in _LIBRARIES), "")
    if _FBGEMM.search(base):
        library = "FBGEMM"
    detail = _detail(arguments)
    for pattern, family in _FAMILIES:
        if arguments and pattern.search(base):
            return _made_for(base, family, arguments, detail)
    words = _words(base)
    if library == "FBGEMM":
        words = _fbgemm_words(words)
    if not words or words in (["kernel2"], ["global"], ["run"]):
        owner = [w for name in path[:-1] for w in _words(name.partition("<")[0]) if not library]
        words = [*owner, *(w for n in _informative(arguments, 2) for w in _words(n))]
    if base.lower().replace("_", "").startswith("indexfunc"):
        words += [w for n in _informative(arguments, 1) for w in _words(n)]
    short = _spoken(words).replace("index reduce reduce", "index")
    if len(path) == 1 and not library and any(word not in base for word in words):
        short = base if short == " ".join(words) else short  # letters stand as the program has them
    kind = _type(arguments) if library == "cub" else _floating(arguments) or _type(arguments)
    short = _joined((library, short, "" if kind == "fp32" else kind))
    return KernelName(short or base or text, detail)


def _detail(arguments: str) -> str:
    """Template arguments in few characters: types that are not all fp32, sizes, flags."""
    types: list[str] = []
    sizes: list[str] = []
    flags = ""
    for given in _pieces(arguments, ",") if arguments else []:
        word = given.rpartition("::")[2]
        if word in ("true", "false"):
            flags += "+" if word == "true" else "-"
        elif size := re.fullmatch(r"(-?\d+)(?:u?l*)", word):
            sizes.append(size[1])
        elif (kind := _TYPES.get(word.lstrip("_"), "")) and [kind] != types[-1:]:
            types.append(kind)
    types = [] if types == ["fp32"] else types
    flags = f"flags {flags}" if len(flags) > 1 else ""
    return _joined((" ".join(types), " ".join(sizes), flags), ", ")


def _fbgemm_words(words: list[str]) -> list[str]:
    """``split embedding backward rowwise adagrad unweighted cta per row 1``: what it does first."""
    if words[:2] not in (["split", "embedding"], ["dense", "embedding"]):
        return words
    phase = next((word for word in words[2:] if word in ("forward", "backward")), "")
    rest = [word for word in words[2:] if word not in (phase, "1")]
    if phase == "backward":
        how = next((at for at, word in enumerate(rest) if word.endswith("weighted")), len(rest))
        return [*(rest[:how] or ["embedding"]), phase, *rest[how:]]
    return [*words[0 : words[0] == "dense"], "embedding", phase, *rest]


def _made_for(base: str, family: str, arguments: str, detail: str) -> KernelName:
    """An elementwise kernel, reduction or the like, by its functor."""
    names = _informative(arguments, 2)
    if not re.search(r"Op[A-Z]|Pointwise", names[0] if names else ""):
        names = names[:1]  # of a list of operations the second says which
    words = [word for name in names for word in _words(name)]
    what = _spoken(words) or "of unknown functor"
    kind, scalar = _type(arguments), re.search(r"\b([AB])UnaryFunctor", arguments)
    bare = what.split(" ")[0] in _BARE
    what += " scalar" if scalar else ""
    short = _joined(("" if bare else family, what, "" if kind == "fp32" else kind))
    how = []
    if re.match(r"vectorized", base):
        how.append(f"vector {arguments.split(',')[0]}")
    elif re.match(r"unrolled", base):
        how.append("casting" if "LoadWithCast" in arguments else "unrolled")
    elif family == "elementwise":
        how.append("strided")
    if family != "elementwise" and detail:
        how.append(detail)
    if scalar:
        how.append("scalar first" if scalar[1] == "A" else "scalar second")
    if count := re.search(r"[aA]rray<char\s*\*, (\d+)", arguments):
        how.append(f"{count[1]} operands")
    return KernelName(short, ", ".join(how))


# ---- generated names ----------------------------------------------------------------------

_COPIED = re.compile(r"^(Memcpy|Memset)\b\s*(.*)$")
_TRITON = re.compile(r"^triton_(?P<rest>.*)$")
UNNAMED_TRITON = "unnamed triton kernels"
"""Short name of what Inductor calls ``triton_``, with which arguments are divisible (``0d1d2d``):
many kernels have the same."""

_COLLECTIVE = re.compile(r"^(?:void )?(nccl|rccl|oneccl)(?:Dev)?(?:Kernel)?_?(?P<rest>\w+)", re.I)
_EXPERTS = re.compile(r"\b(?:deep_ep|\w+::ep)::(?:\w+::)*(?P<rest>\w+)")
_COLLECTIVE_WORDS = _by_spelling(WORDS["collectives"])
_SEEMS_PRODUCT = re.compile(
    r"gemm|gemv|cudnn_\d|\bsyrk|\bCijk_|nvjet|xmma|(?:tensorop|simt)_\w*(?:fprop|dgrad|wgrad)|"
    r"convolve|winograd|\bdot_kernel|(?:fprop|dgrad|wgrad)|gcn\w*conv|igemm|wgmma|"
    r"grouped_conv|miopen\w*conv|naive_conv",
    re.I,
)
_GENERATED = re.compile(
    r"(?:\b|(?<=_\dx_))(?:cutlass\w*_(?:simt|tensorop|wmma)\w*|(?:maxwell|pascal|volta|turing|"
    r"ampere|ada|hopper|blackwell|sm\d+)_\w+|nvjet\w+|Cijk_\w+|cudnn_\w+)"
)
_TILE = re.compile(r"^(?:tilesize|MT)?(\d+x\d+(?:x\d+)?)$")
_CORE = re.compile(
    r"^(?P<letter>[sdhibcz])?(?P<shape>\d{3,})?(?P<types>bf16|f16|tf32|i8|f32)?"
    r"(?P<what>gemm|cudnn|fprop|dgrad|wgrad)$"
)


def _copied(text: str) -> KernelName | None:
    match = _COPIED.match(text)
    if not match:
        return None
    direction, _, rest = re.sub(r"[()]", "", match[2]).partition(" ")
    direction = WORDS["directions"].get(direction, direction)
    return KernelName(f"{match[1]} {direction} {rest.strip()}".lower())


def _triton(text: str) -> KernelName | None:
    match = _TRITON.match(text)
    if not match:
        return None
    words = [word for word in match["rest"].split("_") if word]
    if not words or re.fullmatch(r"[\dcdei]+", words[0]):
        return KernelName(_joined([UNNAMED_TRITON, *words]))
    words[0] = WORDS["triton"].get(words[0], words[0])
    words = [word for word in words if word != "fused"]
    # Inductor's template for products multiplies by tl.dot: on tensor cores if types allow
    product = "template" in words[:1] and any(word in ("mm", "bmm", "addmm") for word in words)
    number = f" #{words.pop()}" if words and words[-1].isdigit() else ""
    name = " ".join(["triton", *words])
    return KernelName(_shortened(name, LONGEST_NAME - len(number)) + number, is_product=product)


def _collective(text: str) -> KernelName | None:
    if experts := _EXPERTS.search(text):
        return KernelName(_joined(["DeepEP", *_words(experts["rest"])]))
    match = _COLLECTIVE.match(text)
    if not match:
        return None
    words = match["rest"].split("_")
    what = _COLLECTIVE_WORDS.get(words[0].lower(), _spoken(_words(words[0])))
    rest = [word.lower() if word in ("RING", "TREE", "Sum") else word for word in words[1:]]
    rest.sort(key=lambda word: word not in ("ring", "tree", "NVLS", "COLLNET"))
    rest = ["" if word == "t" else _TYPES.get(word, word) for word in rest]
    return KernelName(_joined([match[1].lower(), what, *rest]))


def _attention(text: str) -> KernelName | None:
    if not re.search(
        r"flash_\w*(?:fwd|bwd)|fmha|sdpa|flash_?attention|\battn_(?:fwd|bwd)", text, re.I
    ):
        return None
    base = _pieces(_signature(text), "::")[-1].partition("<")[0]
    backward = re.search(r"bwd|backward|bprop|cutlassB_", text, re.I)
    told = re.compile("flash|fwd|bwd|forward|backward|attn|attention|kd|b|f")
    words = [word for word in _words(base) if not told.fullmatch(word)]
    library = "cudnn" if "cudnn" in text else "flash" if "flash" in text.lower() else ""
    traits = re.search(r"traits<(\d+), (\d+), (\d+)", text)
    size = f"head {traits[1]}, {traits[2]}x{traits[3]}" if traits else ""
    precision = _operands(text)
    phase = "backward" if backward else "forward"
    main = not re.search(r"dot_do_o|convert_d[qkv]|combine", base)
    uses = True if main and precision in ("bf16", "fp16", "fp8") else None
    what = _joined([library, "attention", phase, *words, precision])
    return KernelName(what, size, precision, uses, is_product=main)


def _operands(text: str) -> str:
    """The type of a product's operands; "" where the name has none or complex ones."""
    return next((name for name, at in WORDS["operands"].items() if re.search(at, text)), "")


_SIMT = re.compile(
    r"gemv|gemmSN|gemmk1|dot_kernel|(?<![a-zA-Z])sgemm|(?:dgrad|wgrad|fprop|conv)\w*_(?:engine|alg\d)|"
    r"(?:dgrad|wgrad|fprop|conv)2d_alg|naive_conv"
)
"""Functions of libraries that multiply without tensor cores: templates of cuDNN from before it had
them, which it still takes for operands in fp32, among them."""


def _product(text: str) -> KernelName | None:
    """Matrix products and convolutions of cuBLAS, cuDNN, CUTLASS and Tensile."""
    signature = _signature(text)
    base = _pieces(signature, "::")[-1].partition("<")[0]
    generated = _GENERATED.search(signature)
    if generated and _SEEMS_PRODUCT.search(generated[0]):
        return _generated(generated[0])
    if "cutlass" in signature and "gemm" in signature.lower():
        return _cutlass_template(signature)
    path = re.sub("fbgemm", "", signature.partition("<")[0], flags=re.IGNORECASE)
    if not _SEEMS_PRODUCT.search(path) or re.search(r"split.?k|offsets|reduce", path, re.I):
        return None
    plain = _function(text)
    simt = _SIMT.search(path) and not re.search(r"grouped|depthwise", path, re.I)
    matrix = re.search(r"xdl|mfma|gtcx|wgmma", path)
    named = _operands(path) if matrix else "fp32" if re.search(r"(?<![a-zA-Z])sgemm", path) else ""
    precision = _floating(signature) or named
    # the name says that a product is SIMT only where it says so; winograd's multiply elsewhere
    uses = True if matrix else False if simt and precision in ("fp32", "fp64", "") else None
    short = plain.short
    if base == "kernel":
        short = " ".join(_words(path.split("::")[-2]) or ["gemm"])
    return KernelName(short, plain.detail, precision, uses, "winograd" not in path)


def _cutlass_template(signature: str) -> KernelName:
    """CUTLASS kernels whose name is their whole type: the tile is the first ``GemmShape``."""
    tile = re.search(r"GemmShape<(\d+), (\d+), (\d+)>", signature)
    units = re.search(
        r"(OpClassSimt|MmaSimt)|OpClassTensorOp|Mma_?Tensor|warpgroup|MMA_|tensorop", signature
    )
    uses = None if not units else not units[1]
    precision = _operands(signature)
    words = ["cutlass", precision, "tensorop" if uses else "simt" if uses is False else ""]
    words += ["gemm", f"{tile[1]}x{tile[2]}" if tile else ""]
    return KernelName(_joined(words), "", precision, uses, True)


def _generated(name: str) -> KernelName:
    """``ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn`` and its like."""
    tokens = [token for token in name.split("_") if token]
    if tokens[0].startswith("nvjet"):
        return _nvjet(tokens)
    if tokens[0] == "Cijk":
        return _tensile(name, tokens)
    core = next((match for token in tokens if (match := _CORE.match(token))), None)
    tiles = [match[1] for token in tokens if (match := _TILE.match(token))]
    layout = next((token for token in tokens if re.fullmatch(r"[nt]{2,3}", token)), "")
    extra = [t for t in tokens if t in ("relu", "gelu", "bias", "splitK", "winograd")]
    if "xmma" in tokens:
        uses: bool | None = "ffma" not in tokens and not re.search(r"f32f32_f32f32|f64f64", name)
        uses = uses or "tensor" in name
        kind = next((t for t in tokens if t in ("gemm", "fprop", "dgrad", "wgrad")), "product")
    else:
        letter = core["letter"] if core else ""
        shaped = bool(core and core["shape"])
        uses = True if shaped or re.search(r"tensorop|wmma|wgmma|hmma|imma", name) else None
        if uses is None and (re.search(r"simt", name) or letter in ("s", "d") or "scudnn" in name):
            uses = False
        kind = core["what"] if core else next((t for t in tokens if "gemm" in t), "product")
    types = re.sub(r"void|f2f", "", name)
    precision = _operands(types.replace("tensor", ""))
    if core and not uses:
        precision = WORDS["letters"]["gemm"].get(core["letter"], precision)
    elif core and core["shape"] and precision in ("", "fp32"):
        # fp32 operands on tensor cores are cut to TF32; Volta's instruction 884 takes fp16
        precision = {"d": "fp64", "i": "int8", "h": "fp16"}.get(core["letter"] or "", "tf32")
        precision = "fp16" if core["shape"] == "884" and precision == "tf32" else precision
    if "scudnn" in name:
        precision, kind = "fp32", "conv"
    spoken = {"fprop": "conv forward", "dgrad": "conv backward input", "cudnn": "conv"}
    kind = {**spoken, "wgrad": "conv backward weight"}.get(kind, kind)
    simt_gemm = core and core["letter"] and not uses and core["what"] == "gemm"
    kind = f"{core['letter']}gemm" if core and simt_gemm else kind
    first = re.sub(r"^(cutlass)\w*", r"\1", tokens[0])
    words = [first, "xmma" if "xmma" in tokens else "", "" if simt_gemm else precision]
    words += ["tensorop" if uses and first == "cutlass" else "", kind, *extra, *tiles[:1], layout]
    sliced = [t for t in tokens if re.match(r"sliced|stage|ldg|align|tensor\d|warpgroup", t)]
    more = [*tiles[1:], *sliced, *(t for t in tokens[1:] if t in _VARIANTS)]
    return KernelName(_joined(words), ", ".join(more), precision, uses, True)


_VARIANTS = ("interior", "small", "medium", "large", "stridedB", "xregs", "exp", "nhwc", "segment")


def _nvjet(tokens: list[str]) -> KernelName:
    letters = next((t for t in tokens[1:] if re.fullmatch(r"[a-z]{3,6}", t)), "")
    precision = WORDS["letters"]["nvjet"].get(letters[:1], "")
    tiles = [token for token in tokens if re.fullmatch(r"\d+x\d+", token)]
    layout = tokens[-1] if re.fullmatch(r"[NT]{3}", tokens[-1]) else ""
    words = ["nvjet", precision, "gemm", *tiles[:1], layout.lower()]
    rest = [t for t in tokens[1:] if t not in (*tiles[:1], layout)]
    return KernelName(_joined(words), " ".join(rest), precision, True, True)


def _tensile(name: str, tokens: list[str]) -> KernelName:
    """AMD's: ``Cijk_Alik_Bljk_BBS_BH_MT128x128x64_MI16x16x16...``: ``MI`` is a matrix core's."""
    types = next((t for t in tokens[3:] if re.fullmatch(r"[BHSDI]{2,3}H?", t)), "")
    tile = re.search(r"MT(\d+x\d+(?:x\d+)?)", name)
    uses = True if re.search(r"_MI\d+x", name) else None
    layout, precision = "".join(tokens[1:3]), WORDS["letters"]["tensile"].get(types[:1], "")
    words = ["Tensile", precision, "gemm", tile[1] if tile else ""]
    if "PostGSU" in name:
        return KernelName("split-k reduction Tensile", layout)
    return KernelName(_joined(words), layout, precision, uses, True)
