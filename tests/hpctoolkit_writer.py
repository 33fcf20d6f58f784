"""Writes valid HPCToolkit databases of format 4.0, of any size and shape, for tests.

Made from FORMATS.md, apart from the reader: nothing of ``dlrm_core`` is used here,
so that the two check each other. Written columns at a time with numpy, so that a
million contexts take seconds.

    tree = random_tree(numpy.random.default_rng(0), nodes=1000)
    made = write_database(folder, tree, [Measured(values={"CPUTIME (sec)": points})])
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.hpctoolkit_meta import KINDS, SCOPES, Section, write_meta
from tests.hpctoolkit_tree import Tree


@dataclass
class Measured:
    """One thread or stream.

    Attributes:
        values: metric to its ``point`` values, shape (nodes,), 0 for none; or a
            function of no arguments giving that.
        ids: identity from node to thread: (kind, logical id, physical id).
        trace: (time_ns, context id) arrays, or None.
        nodes: the nodes that the values are of, increasing and each with its parent, where
            they are few of the tree's; None for all. Only without ``cct`` and ``keep``.
    """

    values: dict[str, np.ndarray] | Callable[[], dict[str, np.ndarray]]
    ids: Sequence[tuple[str, int, int]] = (("NODE", 0, 99), ("THREAD", 0, 0))
    trace: tuple[np.ndarray, np.ndarray] | None = None
    nodes: np.ndarray | None = None


@dataclass
class Written:
    """What a reader must find: (threads, metrics, contexts) inclusive values by context id."""

    metrics: list[str]
    execution: list[np.ndarray]


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
    keep: bool = True,
) -> Written:
    """Write a database; the summary is the sum over threads.

    Args:
        folder: a new folder.
        metrics: names, in order; those of the first thread if None.
        minor, padding: minor version, and bytes added to every expandable structure
            (a multiple of 8), as a later version of the format would.
        cct, traces: whether to write ``cct.db`` and ``trace.db``.
        keep: whether to return the values (threads x metrics x contexts of memory).
    """
    folder.mkdir(parents=True)
    if metrics is None:
        first = threads[0].values if threads else {}
        metrics = list(first() if callable(first) else first)
    head = struct.pack("<BB", 4, minor)
    write_meta(folder / "meta.db", head, tree, metrics, scopes, title, padding)
    blocks = _write_profiles(
        folder / "profile.db", head, tree, threads, metrics, scopes, padding, cct or keep
    )
    if cct:
        _write_cct(folder / "cct.db", head, blocks, len(tree) + tree.first, padding)
    if traces:
        _write_traces(folder / "trace.db", head, threads, padding)
    at = scopes.index("execution")
    step = len(scopes)
    return Written(list(metrics), [block[at::step] for block in blocks] if keep else [])


def _propagate(
    parents: np.ndarray, calls: np.ndarray, levels: list[np.ndarray], whole: np.ndarray, scopes: Any
) -> np.ndarray:
    """(metrics * scopes, contexts) values from point values (metrics, contexts)."""
    execution, function = whole.copy(), whole.copy() if "function" in scopes else None
    for level in reversed(levels[1:]):
        above = parents[level]
        for metric in range(len(whole)):
            np.add.at(execution[metric], above, execution[metric, level])
            if function is not None:
                lexical = ~calls[level]
                np.add.at(function[metric], above[lexical], function[metric, level[lexical]])
    by_scope = {"point": whole, "execution": execution, "function": function}
    by_scope["lex_aware"] = function
    if len(scopes) == 1:
        return by_scope[scopes[0]]
    result = np.empty((len(whole) * len(scopes), whole.shape[1]))
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
    threads: Sequence[Measured],
    metrics: Sequence[str],
    scopes: Sequence[str],
    padding: int,
    keep: bool,
) -> list[np.ndarray]:
    identities = Section(16 + 16 * 2)
    pointers = [0]
    for thread in threads:
        record = struct.pack("<H6x", len(thread.ids))
        for kind, logical, physical in thread.ids:
            record += struct.pack("<BxHIQ", KINDS.index(kind), 0, logical, physical)
        pointers.append(identities.add(record))
    infos = Section(identities.align())
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

        def put(number: int, block: np.ndarray, flags: int, contexts: Any = None) -> None:
            keys, starts, values = _sparse(block, "<u2")
            keys = keys if contexts is None else contexts[keys]
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

        parents, depths = tree.all_parents(), tree.depths()
        calls = np.concatenate([np.ones(tree.first, np.bool_), tree.call])
        every = np.arange(len(parents))
        shape = (len(metrics) * len(scopes), len(parents))
        for number, thread in enumerate(threads, 1):
            given = thread.values() if callable(thread.values) else thread.values
            chosen = every
            if thread.nodes is not None:
                chosen = np.append(every[: tree.first], thread.nodes + tree.first)
            if given:
                points = np.zeros((len(metrics), len(chosen)))
                for row, name in enumerate(metrics):
                    points[row, tree.first :] = given.get(name, 0.0)
                depth = depths[chosen]
                order = np.argsort(depth, kind="stable")
                levels = np.split(order, np.cumsum(np.bincount(depth))[:-1])
                above = np.searchsorted(chosen, parents[chosen])
                block = _propagate(above, calls[chosen], levels, points, scopes)
            else:
                block = np.zeros(shape if keep else (shape[0], 0))
            put(number, block, 0, chosen)
            if given:
                total = np.zeros(shape) if total is None else total
                total[:, chosen] += block
            if keep:
                blocks.append(block)
            del block
        put(0, np.zeros(shape) if total is None else total, 1)
        file.seek(-file.tell() % 8, 1)
        file.write(b"_prof.db")
        infos.data += b"".join(record + bytes(padding) for record in records)
        pairs = struct.pack(
            "<QQQQ", *(len(infos.data), infos.start, len(identities.data), identities.start)
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
    section = Section(16 + 16)
    stride = 32 + padding
    section.add(bytes(16 + padding))
    section.data[:13] = struct.pack("<QIB", section.here, contexts, stride)
    table_end = section.here + stride * contexts
    body = Section(table_end)
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
    section = Section(16 + 16)
    section.add(bytes(32 + padding))
    stride = 24 + padding
    table = section.here
    body = Section(table + stride * len(threads))
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
