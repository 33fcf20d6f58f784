"""Writes ``meta.db``: names, metrics, modules, files, functions, and the tree of contexts."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.hpctoolkit_tree import FUNCTION, INSTRUCTION, Tree

KINDS = ("SUMMARY", "NODE", "RANK", "THREAD", "GPUDEVICE", "GPUCONTEXT", "GPUSTREAM", "CORE")
SCOPES = ("point", "function", "lex_aware", "execution")
SCOPE_TYPES = {"point": 1, "function": 3, "lex_aware": 3, "execution": 2}


class Section:
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


def finish(
    path: Path, code: bytes, head: bytes, sections: Sequence[Section], footer: bytes
) -> None:
    pairs = b"".join(struct.pack("<QQ", len(s.data), s.start) for s in sections)
    body = bytearray(b"HPCTOOLKIT" + code + head + pairs)
    for section in sorted(sections, key=lambda s: s.start):
        body += b"\0" * (section.start - len(body))
        body += section.data
    body += b"\0" * (-len(body) % 8)
    path.write_bytes(bytes(body) + footer)


def write_meta(
    path: Path,
    head: bytes,
    tree: Tree,
    metrics: Sequence[str],
    scopes: Sequence[str],
    title: str,
    padding: int,
) -> None:
    extra = b"\xaa" * padding
    general = Section(16 + 16 * 8)
    general.add(bytes(16) + extra)
    texts = general.string(title), general.string("a description")
    general.data[:16] = struct.pack("<QQ", *texts)

    names = Section(general.align())
    names.add(bytes(16) + extra)
    pointers = [names.string(kind) for kind in KINDS]
    table = names.add(struct.pack(f"<{len(KINDS)}Q", *pointers))
    names.data[:9] = struct.pack("<QB", table, len(KINDS))

    listing = _metrics_section(names.align(), metrics, scopes, padding)
    strings = Section(listing.align())
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
    finish(path, b"meta", head, sections, b"_meta.db")


def _list_section(start: int, records: list[bytes], padding: int) -> tuple[Section, list[int]]:
    """A header and an array; the addresses of its records."""
    section = Section(start)
    stride = (len(records[0]) if records else 16) + padding
    section.add(bytes(16) + bytes(padding))
    addresses = [section.add(record + bytes(padding)) for record in records]
    section.data[:14] = struct.pack("<QIH", addresses[0] if addresses else 0, len(records), stride)
    return section, addresses


def _metrics_section(
    start: int, metrics: Sequence[str], scopes: Sequence[str], padding: int
) -> Section:
    section = Section(start)
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
) -> Section:
    """Contexts grouped by parent, each group one array; a word at a time for all of them."""
    section = Section(start)
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
