"""Writes valid HPCToolkit databases of format 4.0, of any size and shape, for tests.

Made from FORMATS.md, apart from the reader: nothing of ``dlrm_core`` is used here,
so that the two check each other. Written columns at a time with numpy, so that a
million contexts take seconds.

    tree = random_tree(numpy.random.default_rng(0), nodes=1000)
    made = write_database(folder, tree, [Measured(values={"CPUTIME (sec)": points})])
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("SUMMARY", "NODE", "RANK", "THREAD", "GPUDEVICE", "GPUCONTEXT", "GPUSTREAM", "CORE")
SCOPES = ("point", "function", "lex_aware", "execution")
SCOPE_TYPES = {"point": 1, "function": 3, "lex_aware": 3, "execution": 2}
FUNCTION, LOOP, LINE, INSTRUCTION = range(4)


@dataclass
class Tree:
    """Calling contexts below the entry points; every column has shape (nodes,).

    Attributes:
        parent: index of the parent, always smaller; −1 − e for entry point e.
        kind: 0 function, 1 loop, 2 line, 3 instruction.
        call: whether its parent calls it (else the parent encloses it).
        function: index into ``functions`` for kind 0.
        line: source line for kinds 1 and 2, offset for kind 3.
        hidden: leaves that hold values and are left out of ``meta.db``.
    """

    parent: np.ndarray
    kind: np.ndarray
    call: np.ndarray
    function: np.ndarray
    line: np.ndarray
    hidden: np.ndarray
    functions: list[str]
    files: list[str] = field(default_factory=lambda: ["src/main.c", "dlrm_core/step.py"])
    modules: list[str] = field(default_factory=lambda: ["/bin/program", "<logical python>"])
    entries: list[str] = field(default_factory=lambda: ["main thread"])
    python: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def first(self) -> int:
        """Context id of node 0; ids below are the root (0) and the entry points."""
        return 1 + len(self.entries)

    def all_parents(self) -> np.ndarray:
        """Parent of every context by id, entries and root (−1) included."""
        below = np.where(self.parent < 0, -self.parent, self.parent + self.first)
        return np.concatenate([[-1], np.zeros(len(self.entries), np.int64), below])

    def levels(self) -> list[np.ndarray]:
        """Context ids by depth, root first."""
        depth = [0] * (len(self) + self.first)
        for context, parent in enumerate(self.all_parents().tolist()):
            if parent >= 0:
                depth[context] = depth[parent] + 1
        order = np.argsort(depth, kind="stable")
        return np.split(order, np.cumsum(np.bincount(depth))[:-1])


def random_tree(
    rng: np.random.Generator,
    nodes: int,
    shape: str = "random",
    entries: int = 1,
    hidden: float = 0.2,
    functions: Sequence[str] = ("main", "kernel<float, std::pair<int, 2>>(int*)", "größe"),
) -> Tree:
    """A tree of ``nodes`` contexts: ``random``, ``deep`` (one chain) or ``wide`` (one parent)."""
    index = np.arange(nodes)
    if shape == "deep":
        parent = index - 1
    elif shape == "wide":
        parent = np.zeros(nodes, np.int64)
        parent[:1] = -1
    else:
        parent = (rng.random(nodes) * index).astype(np.int64)
        roots = min(nodes, entries)
        parent[:roots] = -1 - np.arange(roots)
    kind = rng.integers(0, 4, nodes)
    leaf = np.ones(nodes, np.bool_)
    leaf[parent[parent >= 0]] = False
    is_hidden = leaf & (parent >= 0) & (rng.random(nodes) < hidden)
    kind[is_hidden] = INSTRUCTION
    return Tree(
        parent=parent,
        kind=kind,
        call=kind == FUNCTION,
        function=rng.integers(0, len(functions), nodes),
        line=rng.integers(1, 5000, nodes),
        hidden=is_hidden,
        functions=list(functions),
        entries=["main thread", "application thread", "unknown entry"][:entries],
    )


@dataclass
class Measured:
    """One thread or stream.

    Attributes:
        values: metric to its ``point`` values, shape (nodes,), 0 for none; or a
            function of no arguments giving that.
        ids: identity from node to thread: (kind, logical id, physical id).
        trace: (time_ns, context id) arrays, or None.
    """

    values: dict[str, np.ndarray] | Callable[[], dict[str, np.ndarray]]
    ids: Sequence[tuple[str, int, int]] = (("NODE", 0, 99), ("THREAD", 0, 0))
    trace: tuple[np.ndarray, np.ndarray] | None = None


@dataclass
class Written:
    """What a reader must find: (threads, metrics, contexts) inclusive values by context id."""

    metrics: list[str]
    execution: list[np.ndarray]


class _Section:
    """Bytes under construction, with absolute addresses."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.data = bytearray()

    @property
    def here(self) -> int:
        return self.start + len(self.data)

    def align(self, to: int = 8) -> int:
        self.data += b"\0" * (-self.here % to)
        return self.here

    def add(self, data: bytes, to: int = 8) -> int:
        at = self.align(to)
        self.data += data
        return at

    def string(self, text: str) -> int:
        return self.add(text.encode() + b"\0", 1)


def write_database(
    folder: Path,
    tree: Tree,
    threads: Sequence[Measured],
    *,
    metrics: Sequence[str] | None = None,
    scopes: Sequence[str] = SCOPES,
    title: str = "made by tests",
    minor: int = 0,
    padding: int = 0,
    cct: bool = True,
    traces: bool = True,
    taxonomy: str | None = None,
    keep: bool = True,
) -> Written:
    """Write a database; the summary is the sum over threads.

    Args:
        folder: a new folder.
        metrics: names, in order; those of the first thread if None.
        minor, padding: minor version, and bytes added to every expandable structure
            (a multiple of 8), as a later version of the format would.
        cct, traces: whether to write ``cct.db`` and ``trace.db``.
        taxonomy: text of ``metrics/default.yaml``; plain sums if None.
        keep: whether to return the values (threads x metrics x contexts of memory).
    """
    folder.mkdir(parents=True)
    if metrics is None:
        first = threads[0].values if threads else {}
        metrics = list(first() if callable(first) else first)
    head = struct.pack("<BB", 4, minor)
    _write_meta(folder / "meta.db", head, tree, metrics, scopes, title, padding)
    levels = tree.levels()
    blocks = _write_profiles(
        folder / "profile.db", head, tree, levels, threads, metrics, scopes, padding, cct or keep
    )
    if cct:
        _write_cct(folder / "cct.db", head, blocks, len(tree) + tree.first, padding)
    if traces:
        _write_traces(folder / "trace.db", head, threads, padding)
    (folder / "metrics").mkdir()
    (folder / "metrics" / "default.yaml").write_text(taxonomy or _taxonomy(metrics))
    at = scopes.index("execution")
    step = len(scopes)
    return Written(list(metrics), [block[at::step] for block in blocks] if keep else [])


def _taxonomy(metrics: Sequence[str]) -> str:
    lines = ["version: 0", "inputs:"]
    for i, name in enumerate(metrics):
        for scope in ("execution", "function"):
            lines += [f"  - &m{i}-{scope}", f"    metric: {name!r}", f"    scope: {scope}"]
            lines += ["    formula: $$", "    combine: sum"]
    lines.append("roots:")
    for i, name in enumerate(metrics):
        lines += [f"  - name: {name!r}", "    variants:", "      Sum:", "        formula:"]
        lines += [f"          inclusive: {{standard: *m{i}-execution}}"]
        lines += [f"          exclusive: {{standard: *m{i}-function}}"]
    return "\n".join(lines) + "\n"


def _finish(
    path: Path, code: bytes, head: bytes, sections: Sequence[_Section], footer: bytes
) -> None:
    pairs = b"".join(struct.pack("<QQ", len(s.data), s.start) for s in sections)
    body = bytearray(b"HPCTOOLKIT" + code + head + pairs)
    for section in sorted(sections, key=lambda s: s.start):
        body += b"\0" * (section.start - len(body))
        body += section.data
    body += b"\0" * (-len(body) % 8)
    path.write_bytes(bytes(body) + footer)


def _write_meta(
    path: Path,
    head: bytes,
    tree: Tree,
    metrics: Sequence[str],
    scopes: Sequence[str],
    title: str,
    padding: int,
) -> None:
    extra = b"\xaa" * padding
    general = _Section(16 + 16 * 8)
    general.add(bytes(16) + extra)
    texts = general.string(title), general.string("a description")
    general.data[:16] = struct.pack("<QQ", *texts)

    names = _Section(general.align())
    names.add(bytes(16) + extra)
    pointers = [names.string(kind) for kind in KINDS]
    table = names.add(struct.pack(f"<{len(KINDS)}Q", *pointers))
    names.data[:9] = struct.pack("<QB", table, len(KINDS))

    listing = _metrics_section(names.align(), metrics, scopes, padding)
    strings = _Section(listing.align())
    modules = [strings.string(text) for text in tree.modules]
    files = [strings.string(text) for text in tree.files]
    functions = [strings.string(text) for text in tree.functions]
    entries = [strings.string(text) for text in tree.entries]

    module_list, module_at = _list_section(
        strings.align(), [struct.pack("<QQ", 0, at) for at in modules], padding
    )
    file_list, file_at = _list_section(
        module_list.align(), [struct.pack("<QQ", 1, at) for at in files], padding
    )
    records = []
    for i, name in enumerate(functions):
        python = i in tree.python
        records.append(
            struct.pack("<QQQQII", name, module_at[python], 0, file_at[python], 10 + i, 0)
        )
    function_list, function_at = _list_section(file_list.align(), records, padding)
    contexts = _context_section(
        function_list.align(), tree, entries, function_at, file_at, module_at, padding
    )
    sections = [
        general, names, listing, contexts, strings, module_list, file_list, function_list,
    ]  # fmt: skip
    _finish(path, b"meta", head, sections, b"_meta.db")


def _list_section(start: int, records: list[bytes], padding: int) -> tuple[_Section, list[int]]:
    """A header and an array; the addresses of its records."""
    section = _Section(start)
    stride = (len(records[0]) if records else 16) + padding
    section.add(bytes(16) + bytes(padding))
    addresses = [section.add(record + bytes(padding)) for record in records]
    section.data[:14] = struct.pack("<QIH", addresses[0] if addresses else 0, len(records), stride)
    return section, addresses


def _metrics_section(
    start: int, metrics: Sequence[str], scopes: Sequence[str], padding: int
) -> _Section:
    section = _Section(start)
    section.add(bytes(0x20 + padding))
    names = [section.string(scope) for scope in scopes]
    scope_at = [
        section.add(struct.pack("<QBB6x", name, SCOPE_TYPES[scope], bit % 16) + bytes(padding))
        for bit, (name, scope) in enumerate(zip(names, scopes, strict=True))
    ]
    formula = section.string("$$")
    records = []
    for i, metric in enumerate(metrics):
        name = section.string(metric)
        ids = [i * len(scopes) + j for j in range(len(scopes))]
        instances = [
            section.add(struct.pack("<QH6x", at, number) + bytes(padding))
            for at, number in zip(scope_at, ids, strict=True)
        ]
        summaries = [
            section.add(struct.pack("<QQBxH4x", at, formula, 0, number) + bytes(padding))
            for at, number in zip(scope_at, ids, strict=True)
        ]
        records.append(
            struct.pack(
                "<QQQHH4x", name, instances[0], summaries[0], len(instances), len(summaries)
            )
        )
    table = [section.add(record + bytes(padding)) for record in records]
    section.data[:0x1B] = struct.pack(
        "<QIBBBxQHB",
        table[0] if table else 0,
        len(table),
        32 + padding,
        16 + padding,
        24 + padding,
        scope_at[0],
        len(scopes),
        16 + padding,
    )
    return section


def _context_section(
    start: int,
    tree: Tree,
    entry_names: list[int],
    function_at: list[int],
    file_at: list[int],
    module_at: list[int],
    padding: int,
) -> _Section:
    """Contexts grouped by parent, each group one array; a word at a time for all of them."""
    section = _Section(start)
    section.add(bytes(16 + padding))
    count = len(tree.entries)
    stride = 32 + padding
    base = section.align() + count * stride
    shown = np.flatnonzero(~tree.hidden)
    groups = tree.all_parents()[tree.first :][shown]
    order = shown[np.argsort(groups, kind="stable")]
    groups = np.sort(groups, kind="stable")
    kind = tree.kind[order]
    words = 4 + np.where(kind == FUNCTION, 1, 2) + padding // 8
    place = np.concatenate([[0], np.cumsum(words)])
    total = int(place[-1])
    data = np.zeros(total, "<u8")
    at = place[:-1]
    # Children of context c: from the first to past the last record of its group.
    child_start = np.zeros(len(tree) + tree.first, np.int64)
    child_size = np.zeros_like(child_start)
    if len(order):
        edges = np.flatnonzero(np.diff(groups, prepend=-1))
        ends = np.append(edges[1:], len(groups))
        child_start[groups[edges]] = base + 8 * place[edges]
        child_size[groups[edges]] = 8 * (place[ends] - place[edges])
    ids = order + tree.first
    flags = np.array([1, 2, 2, 4])[kind]
    data[at] = child_size[ids]
    data[at + 1] = child_start[ids]
    data[at + 2] = (
        ids
        | (flags << 32)
        | (tree.call[order].astype(np.int64) << 40)
        | (kind << 48)
        | ((words - 4) << 56)
    ).astype("<u8")
    data[at + 3] = (~tree.call[order]).astype("<u8")
    is_function, is_point = kind == FUNCTION, kind == INSTRUCTION
    other = ~is_function
    data[at[is_function] + 4] = np.array(function_at)[tree.function[order[is_function]]]
    data[at[other] + 4] = np.where(is_point[other], module_at[0], file_at[0])
    data[at[other] + 5] = tree.line[order[other]]
    entry_type = {"unknown entry": 0, "main thread": 1, "application thread": 2}
    for i, name in enumerate(tree.entries):
        section.add(
            struct.pack(
                "<QQIH2xQ",
                child_size[i + 1],
                child_start[i + 1],
                i + 1,
                entry_type.get(name, 0),
                entry_names[i],
            )
            + bytes(padding)
        )
    section.data[:11] = struct.pack("<QHB", base - count * stride, count, stride)
    section.data += data.tobytes()
    return section


def _propagate(tree: Tree, levels: list[np.ndarray], points: np.ndarray, scopes: Any) -> np.ndarray:
    """(metrics * scopes, contexts) values from point values (metrics, nodes)."""
    parents = tree.all_parents()
    whole = np.zeros((len(points), len(tree) + tree.first))
    whole[:, tree.first :] = points
    execution, function = whole.copy(), whole.copy() if "function" in scopes else None
    calls = np.concatenate([np.ones(tree.first, np.bool_), tree.call])
    for level in reversed(levels[1:]):
        above = parents[level]
        for metric in range(len(points)):
            np.add.at(execution[metric], above, execution[metric, level])
            if function is not None:
                lexical = ~calls[level]
                np.add.at(function[metric], above[lexical], function[metric, level[lexical]])
    by_scope = {"point": whole, "execution": execution, "function": function}
    by_scope["lex_aware"] = function
    if len(scopes) == 1:
        return by_scope[scopes[0]]
    result = np.empty((len(points) * len(scopes), whole.shape[1]))
    for j, scope in enumerate(scopes):
        result[j :: len(scopes)] = by_scope[scope]
    return result


def _sparse(block: np.ndarray, value_type: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(keys of non-empty columns, first value of each, packed (row, value)) by column."""
    columns = np.ascontiguousarray(block.T)
    column, row = np.nonzero(columns)
    values = np.empty(len(column), np.dtype([("row", value_type), ("value", "<f8")]))
    values["row"], values["value"] = row, columns[column, row]
    keys, starts = np.unique(column, return_index=True)
    return keys, starts, values


def _write_profiles(
    path: Path,
    head: bytes,
    tree: Tree,
    levels: list[np.ndarray],
    threads: Sequence[Measured],
    metrics: Sequence[str],
    scopes: Sequence[str],
    padding: int,
    keep: bool,
) -> list[np.ndarray]:
    identities = _Section(16 + 16 * 2)
    pointers = [0]
    for thread in threads:
        record = struct.pack("<H6x", len(thread.ids))
        for kind, logical, physical in thread.ids:
            record += struct.pack("<BxHIQ", KINDS.index(kind), 0, logical, physical)
        pointers.append(identities.add(record))
    infos = _Section(identities.align())
    stride = 48 + padding
    infos.add(bytes(16 + padding))
    table = infos.here
    infos.data[:13] = struct.pack("<QIB", table, len(pointers), stride)
    end = infos.here + stride * len(pointers)
    blocks: list[np.ndarray] = []
    records: list[bytes] = [b""] * len(pointers)
    total: np.ndarray | None = None
    with path.open("wb") as file:
        file.seek(end)

        def put(number: int, block: np.ndarray, flags: int) -> None:
            keys, starts, values = _sparse(block, "<u2")
            file.seek(-file.tell() % 8, 1)
            values_at = file.tell()
            values.tofile(file)
            file.seek(-file.tell() % 8, 1)
            index_at = file.tell()
            index = np.empty(len(keys), np.dtype([("key", "<u4"), ("start", "<u8")]))
            index["key"], index["start"] = keys, starts
            index.tofile(file)
            records[number] = struct.pack(
                "<QQI4xQQI4x",
                *(len(values), values_at, len(keys), index_at, pointers[number], flags),
            )

        shape = (len(metrics) * len(scopes), len(tree) + tree.first)
        for number, thread in enumerate(threads, 1):
            given = thread.values() if callable(thread.values) else thread.values
            if given:
                points = np.stack([given.get(name, np.zeros(len(tree))) for name in metrics])
                block = _propagate(tree, levels, points, scopes)
            else:
                block = np.zeros(shape if keep else (shape[0], 0))
            put(number, block, 0)
            if given:
                total = block.copy() if total is None else total + block
            if keep:
                blocks.append(block)
            del block
        put(0, np.zeros(shape) if total is None else total, 1)
        file.seek(-file.tell() % 8, 1)
        file.write(b"_prof.db")
        infos.data += b"".join(record + bytes(padding) for record in records)
        pairs = struct.pack(
            "<QQQQ",
            *(len(infos.data), infos.start, len(identities.data), identities.start),
        )
        file.seek(0)
        file.write(b"HPCTOOLKITprof" + head + pairs)
        file.write(bytes(identities.data))
        file.seek(infos.start)
        file.write(bytes(infos.data))
    return blocks


def _write_cct(
    path: Path, head: bytes, blocks: list[np.ndarray], contexts: int, padding: int
) -> None:
    section = _Section(16 + 16)
    stride = 32 + padding
    section.add(bytes(16 + padding))
    section.data[:13] = struct.pack("<QIB", section.here, contexts, stride)
    table_end = section.here + stride * contexts
    body = _Section(table_end)
    # (contexts, metrics, profiles): by context, then metric, then thread.
    cube = np.stack(blocks) if blocks else np.zeros((0, 0, contexts))
    for context in range(contexts):
        plane = cube[:, :, context]  # (profiles, metrics)
        keys, starts, values = _sparse(plane, "<u4")
        values["row"] += 1
        values_at = body.add(values.tobytes())
        index = np.empty(len(keys), np.dtype([("key", "<u2"), ("start", "<u8")]))
        index["key"], index["start"] = keys, starts
        index_at = body.add(index.tobytes())
        section.data += struct.pack("<QQH6xQ", len(values), values_at, len(keys), index_at)
        section.data += bytes(padding)
    pairs = struct.pack("<QQ", len(section.data), section.start)
    body.align()
    path.write_bytes(
        b"HPCTOOLKITctxt" + head + pairs + bytes(section.data) + bytes(body.data) + b"__ctx.db"
    )


def _write_traces(path: Path, head: bytes, threads: Sequence[Measured], padding: int) -> None:
    section = _Section(16 + 16)
    section.add(bytes(32 + padding))
    stride = 24 + padding
    table = section.here
    body = _Section(table + stride * len(threads))
    first, last = (1 << 64) - 1, 0
    for number, thread in enumerate(threads, 1):
        times, contexts = thread.trace or (np.empty(0, "<u8"), np.empty(0, "<u4"))
        samples = np.empty(len(times), np.dtype([("time", "<u8"), ("context", "<u4")]))
        samples["time"], samples["context"] = times, contexts
        start = body.add(samples.tobytes())
        section.data += struct.pack("<I4xQQ", number, start, body.here) + bytes(padding)
        if len(times):
            first, last = min(first, int(times[0])), max(last, int(times[-1]))
    section.data[:32] = struct.pack("<QIB3xQQ", table, len(threads), stride, first, last)
    pairs = struct.pack("<QQ", len(section.data), section.start)
    body.align()
    path.write_bytes(
        b"HPCTOOLKITtrce" + head + pairs + bytes(section.data) + bytes(body.data) + b"trace.db"
    )
