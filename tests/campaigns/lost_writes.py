"""Replays what writers asked of the system, loses what was not synced, and reads what is left.

A kill cannot show whether a write was on the disk: the system keeps what a killed process wrote.
Here each writer runs once under strace. Its calls are replayed on a model of a disk that loses, at
a chosen moment, everything whose fsync had not returned: bytes of files, and names in folders
(an fsync of a file does not bring its name; a rename is one event, as in any file system with a
journal). What is lost is all of it, only bytes, only names, or a random part. The folder that is
left is then given to the reader, which must find the old or the new state whole, and everything
that had been announced as done. The data sets are gone on with, and must end as those of a run
that was never stopped.

    python tests/campaigns/lost_writes.py --moments 150 --json FILE

The model is checked at its end against the folder that the writer left.
"""

import argparse
import codecs
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_core.base.files import read_json, write_json

sys.path[:0] = [str(Path(__file__).parents[1])]
from same_files import differing_files  # noqa: E402
from small_data_set import write_text  # noqa: E402

ROOT = Path(__file__).parents[2]
CALLS = (
    "open,openat,creat,write,writev,pwrite64,lseek,ftruncate,truncate,fsync,fdatasync,"
    "rename,renameat,renameat2,mkdir,mkdirat,rmdir,unlink,unlinkat,symlink,link,linkat,mmap,"
    "sendfile,copy_file_range,fallocate"
)


# The disk.


@dataclass
class Inode:
    """A file (bytes) or a folder (names to inodes), as the system has it; ``synced``: the disk."""

    folder: bool = False
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, "Inode"] = field(default_factory=dict)
    synced: bytes = b""
    position: int = 0
    mapped: bool = False
    """Written through memory, which no call tells of: its bytes are taken from the end."""


@dataclass
class Names:
    """A change of names: (folder, name, inode or None) each; one event, kept or lost as one."""

    changes: list[tuple[Inode, str, Inode | None]]


class Disk:
    """What the system and the disk have of one folder.

    Attributes:
        pending: changes of names that no fsync of one of their folders has brought to disk.
        end: where what the writer left lies.
        said: what the writer has printed.
    """

    def __init__(self, top: Path, end: Path) -> None:
        self.top, self.end, self.root = top, end, Inode(folder=True)
        self.durable: dict[int, dict[str, Inode]] = {}
        self.pending: list[Names] = []
        self.said = ""

    def find(self, path: str) -> Inode | None:
        """The inode of an absolute path; None outside the folder, or where nothing is."""
        if path != str(self.top) and not path.startswith(f"{self.top}/"):
            return None
        inode = self.root
        for part in Path(path).relative_to(self.top).parts:
            if part not in inode.names:
                return None
            inode = inode.names[part]
        return inode

    def place(self, path: str) -> tuple[Inode, str] | None:
        """The folder and the name of a path in it."""
        folder = self.find(os.path.dirname(path))  # noqa: PTH120 - of a traced program's text
        return None if folder is None else (folder, os.path.basename(path))  # noqa: PTH119

    def change(self, *changes: tuple[Inode, str, Inode | None]) -> None:
        """Change names as the system has them."""
        for folder, name, inode in changes:
            if inode is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = inode
        self.pending.append(Names(list(changes)))

    def sync(self, inode: Inode, path: str = "") -> None:
        """Bring a file's bytes, or a folder's names, to disk."""
        if not inode.folder:
            # the folder of a data set that is being made has another name at the end
            at_end = path.replace("set.partial", "set").replace(str(self.top), str(self.end), 1)
            written = Path(at_end) if inode.mapped else None
            if written is not None and written.is_file():
                inode.data[:] = written.read_bytes()
            inode.synced = bytes(inode.data)
            return
        brought = [names for names in self.pending if any(c[0] is inode for c in names.changes)]
        self.pending = [names for names in self.pending if names not in brought]
        for names in brought:
            self._bring(self.durable, names)

    @staticmethod
    def _bring(durable: dict[int, dict[str, Inode]], names: Names) -> None:
        for folder, name, inode in names.changes:
            entries = durable.setdefault(id(folder), {})
            if inode is None:
                entries.pop(name, None)
            else:
                entries[name] = inode

    def crash(self, how: str, draw: random.Random, target: Path) -> None:
        """Write what is left after the power went: ``all`` that was not synced is lost, only the
        ``bytes``, only the ``names``, or some of each at ``random``."""
        durable = {key: dict(entries) for key, entries in self.durable.items()}
        kept = {"all": 0, "names": 0, "bytes": len(self.pending)}.get(how)
        for names in self.pending[: draw.randint(0, len(self.pending)) if kept is None else kept]:
            self._bring(durable, names)
        target.mkdir()
        self._write(self.root, durable, how, draw, target)

    def _write(
        self,
        inode: Inode,
        durable: dict[int, dict[str, Inode]],
        how: str,
        draw: random.Random,
        target: Path,
    ) -> None:
        for name, inner in durable.get(id(inode), {}).items():
            if inner.folder:
                (target / name).mkdir()
                self._write(inner, durable, how, draw, target / name)
            else:
                lost = how in ("all", "bytes") or (how == "random" and draw.random() < 0.5)
                (target / name).write_bytes(inner.synced if lost else inner.data)

    def differs(self) -> list[str]:
        """Paths at which the model is not what the writer left: none, or the model is wrong."""
        found: list[str] = []
        self._differs(self.root, self.top, found)
        return found

    def _differs(self, inode: Inode, place: Path, found: list[str]) -> None:
        there = {path.name for path in place.iterdir()}
        found += [str(place / name) for name in there ^ inode.names.keys()]
        for name, inner in inode.names.items():
            path = place / name
            if inner.folder and path.is_dir():
                self._differs(inner, path, found)
            elif path.is_file() and not inner.mapped and path.read_bytes() != bytes(inner.data):
                found.append(str(path))


# The calls.

LINE = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+)(.*)$", re.S)
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
HANDLE = re.compile(r"^(?:AT_FDCWD|\d+)<((?:[^>\\]|\\.)*)>")
RESULT = re.compile(r"<((?:[^>\\]|\\.)*)>")


def joined(lines: Iterator[str]) -> Iterator[str]:
    """Whole lines of a trace: a call that another thread's came in between is in two."""
    begun: dict[str, str] = {}
    for line in lines:
        pid = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>\n"):
            begun[pid] = line.removesuffix("<unfinished ...>\n").rstrip()
        elif " resumed>" in line:
            yield begun.pop(pid, "") + line.split(" resumed>", 1)[1].rstrip("\n")
        else:
            yield line.rstrip("\n")


def text_of(quoted: str) -> bytes:
    data, _ = codecs.escape_decode(quoted.encode("latin-1"))
    return bytes(data)


def path_of(arguments: str, which: int = 0) -> str:
    """The n-th path of a call, absolute; a relative one is in the folder of its handle."""
    handles = re.findall(r"(?:AT_FDCWD|\b\d+)<((?:[^>\\]|\\.)*)>, \"", arguments)
    text = os.fsdecode(text_of(STRING.findall(arguments)[which]))
    if not text.startswith("/") and handles:
        text = os.path.join(handles[min(which, len(handles) - 1)], text)  # noqa: PTH118
    return os.path.normpath(text)


def apply(disk: Disk, call: str, arguments: str, result: int, rest: str) -> bool:
    """Do to the disk what a call did; whether it changed anything there."""
    top = str(disk.top)
    if call == "write" and arguments.startswith("1<"):
        disk.said += text_of(STRING.search(arguments)[1]).decode()  # type: ignore[index]
        return True
    if result < 0 or top not in arguments + rest:
        return False
    handle = HANDLE.match(arguments)
    inode = disk.find(handle[1]) if handle else None
    if call in ("open", "openat", "creat"):
        path = RESULT.search(rest)[1]  # type: ignore[index]
        inode, place = disk.find(path), disk.place(path)
        if inode is None and place and "O_CREAT" in arguments and not path.endswith(" (deleted)"):
            inode = Inode()
            disk.change((*place, inode))
        if inode is not None and not inode.folder:
            inode.position = 0
            if "O_TRUNC" in arguments:
                inode.data.clear()
            if "O_APPEND" in arguments:
                inode.position = len(inode.data)
        return "O_CREAT" in arguments or "O_TRUNC" in arguments
    if call in ("write", "writev", "pwrite64") and inode is not None:
        data = b"".join(text_of(each) for each in STRING.findall(arguments))[:result]
        at = int(arguments.rsplit(",", 1)[1]) if call == "pwrite64" else inode.position
        inode.data.extend(bytes(max(0, at - len(inode.data))))
        inode.data[at : at + len(data)] = data
        if call != "pwrite64":
            inode.position = at + len(data)
        return True
    if call == "lseek" and inode is not None:
        inode.position = result
    elif call in ("ftruncate", "truncate"):
        inode = inode or disk.find(path_of(arguments))
        size = int(arguments.rsplit(",", 1)[1])
        if inode is not None:
            del inode.data[size:]
            inode.data.extend(bytes(size - len(inode.data)))
        return True
    elif call in ("fsync", "fdatasync") and inode is not None:
        disk.sync(inode, handle[1])  # type: ignore[index]
        return True
    elif call.startswith("rename"):
        old, new = path_of(arguments), path_of(arguments, 1)
        moved, source, place = disk.find(old), disk.place(old), disk.place(new)
        if moved is not None and source and place:
            disk.change((*source, None), (*place, moved))
        return True
    elif call in ("mkdir", "mkdirat") and (place := disk.place(path_of(arguments))):
        disk.change((*place, Inode(folder=True)))
        return True
    elif call in ("rmdir", "unlink", "unlinkat") and (place := disk.place(path_of(arguments))):
        disk.change((*place, None))
        return True
    elif call == "mmap" and "MAP_SHARED" in arguments and "PROT_WRITE" in arguments:
        mapped = disk.find(RESULT.search(arguments)[1])  # type: ignore[index]
        if mapped is not None:
            mapped.mapped = True
    elif call in ("link", "linkat", "symlink", "sendfile", "copy_file_range", "fallocate"):
        raise SystemExit(f"the model does not know {call}({arguments[:200]})")
    return False


# The writers and their readers.


@dataclass(frozen=True)
class Kind:
    """A kind of file: its writer, and how it is read.

    Attributes:
        command: that writes into the folder ``OUT``; lines that it prints are what it announces.
        check: given the folder that is left, and the lines announced, what is wrong with it.
        slow: it starts a process, and a third of the moments is tried, each in one way.
    """

    command: list[str]
    check: Callable[[Path, list[str], Path], list[str]]
    slow: bool = False


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code, "OUT"]


LEDGER = """
import sys
from pathlib import Path
from dlrm_workbook.ground.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]) / "deep" / "er" / "ledger.json", {"rows": []},
    work=lambda document: {}, entries="rows", key=("n",), advice="")
for n in range(12):
    ledger.put({"n": n})
    print(n, flush=True)
"""


def check_ledger(left: Path, announced: list[str], whole: Path) -> list[str]:
    file = left / "deep" / "er" / "ledger.json"
    if not file.exists():
        return ["the ledger is gone"] if announced else []
    numbers = [row["n"] for row in read_json(file)["rows"]]
    least = len(announced)
    return [] if numbers == [*range(len(numbers))] and len(numbers) >= least else [str(numbers)]


CHECKPOINTS = """
import sys
from pathlib import Path
import torch
from dlrm_core.run.checkpoint import CheckpointFolder
from dlrm_core.base.files import JsonLines
top = Path(sys.argv[1]) / "run"
folder = CheckpointFolder(top / "checkpoint", 2)
sections = {"model": {"tables": 2}}
with JsonLines(top / "metrics.jsonl") as lines:
    for step in range(1, 7):
        lines.write({"iteration": step})
        lines.sync()
        folder.save(step, sections, {"a": torch.full((9000,), float(step))},
            {"b": torch.full((3,), float(step))}, {"position": step})
        print(step, flush=True)
"""


def check_checkpoints(left: Path, announced: list[str], whole: Path) -> list[str]:
    import json

    from dlrm_core.run.checkpoint import steps_in
    from dlrm_core.run.tensor_files import StoredTensor

    folder, faults = left / "run" / "checkpoint", []
    steps = steps_in(folder)
    if announced and (not steps or steps[-1] < int(announced[-1])):
        faults.append(f"{announced[-1]} was announced, there are {steps}")
    for step in steps:
        place = folder / f"step-{step:08d}"
        manifest = read_json(place / "checkpoint.json")
        for group, records in manifest["tensors"].items():
            for name, record in records.items():
                StoredTensor(place / group / f"{name}.npy", record).check()
        lines = (left / "run" / "metrics.jsonl").read_text().split("\n")[:-1]
        if step not in [json.loads(line)["iteration"] for line in lines[:step]]:
            faults.append(f"the metrics lack iteration {step}")
    return faults


RUN = """
import sys
from pathlib import Path
from dlrm_core.base.files import whole_folder, write_text
from dlrm_workbook.ground.runs import claim_run_folder
from dlrm_workbook.samples import sample_profile
run = claim_run_folder(sys.argv[1], "train", "q", parameters={}, command="x")
print("claimed", run.path.name, flush=True)
write_text(run.path / "train.html", "page" * 3000)
(run.path / "train.ipynb").write_text("notebook" * 5000)  # whoever writes it
(run.path / "logs").mkdir()
(run.path / "logs" / "a.out").write_text("words" * 100)
sample_profile().save(run.path / "profile")
print("profile", flush=True)
run.close("finished")
print("finished", flush=True)
"""


def check_run(left: Path, announced: list[str], whole: Path) -> list[str]:
    faults = []
    words = [line.split()[0] for line in announced]
    folders = [*left.glob("*/*-train-*")]
    records = [read_json(f / "run.json") for f in folders if (f / "run.json").exists()]
    if "claimed" in words and not records:
        faults.append("the claimed run is gone")
    if "finished" in words and [each["status"] for each in records] != ["finished"]:
        faults.append("the finished run is not finished")
    for folder in folders:
        (end,) = whole.glob(f"*/{folder.name}")
        if (folder / "profile").exists() and differing_files(folder / "profile", end / "profile"):
            faults.append("half a profile is seen")
        if "profile" in words and not (folder / "profile").exists():
            faults.append("the profile is gone")
        finished = [each for each in records if each["status"] == "finished"]
        if finished and (differing := differing_files(folder, end)):
            faults.append(f"finished, but {differing}")
    return faults


SET = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.path.join(os.getcwd(), "tests"))
import killed_work
work, top = sys.argv[2], Path(sys.argv[1])
getattr(killed_work, work)(top / "data" / "set")
print("made", flush=True)
"""


def gone_on_with(work: str) -> Callable[[Path, list[str], Path], list[str]]:
    """Checks a data set: it is whole if it is seen, and goes on to the same bytes."""

    def check(left: Path, announced: list[str], whole: Path) -> list[str]:
        from dlrm_workbook.datasets.resumable import NOTE

        target, end = left / "data" / "set", whole / "data" / "set"
        if announced and not target.exists():
            return ["the data set was announced, but is not there"]
        if target.exists() and (differing := differing_files(target, end, (NOTE,))):
            return [f"the data set is seen, but {differing}"]
        if target.exists() and not (target / NOTE).exists():
            return []
        # with its time, by which the work knows it
        shutil.copy2(whole / "data" / "text.txt", target.parent / "text.txt")
        done = subprocess.run(
            [sys.executable, "-c", SET, str(left), work],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return [f"cannot be gone on with: {done.stderr.strip().splitlines()[-1][:300]}"]
        return [f"gone on with, {name} differs" for name in differing_files(target, end)]

    return check


KINDS = {
    "ledger": Kind(python(LEDGER), check_ledger),
    "checkpoints, metrics": Kind(python(CHECKPOINTS), check_checkpoints),
    "run folder, page, profile": Kind(python(RUN), check_run),
    "data set, teacher": Kind([*python(SET), "make_set"], gone_on_with("make_set"), slow=True),
    "Criteo's text": Kind([*python(SET), "convert_text"], gone_on_with("convert_text"), slow=True),
}
HOW = ("all", "bytes", "names", "random")


def trace(kind: Kind, top: Path) -> tuple[Path, Path]:
    """Run a writer under strace; its folder, and the trace."""
    out, file = top / "out", top / "trace"
    out.mkdir()
    if kind.slow:
        # what is preprocessed is on disk before anything begins
        (out / "data").mkdir()
        write_text(out / "data")
    command = [word.replace("OUT", str(out)) for word in kind.command]
    strace = ["strace", "-f", "-y", "-qq", "-s", str(1 << 28), "-e", f"trace={CALLS}"]
    done = subprocess.run(
        [*strace, "-e", "signal=none", "-o", str(file), *command],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command[:6]}: {done.stderr.decode()[-2000:]}")
    return out, file


def replayed(out: Path, end: Path, file: Path, text: bytes) -> Iterator[Disk]:
    """The disk after each call that changed it; at its beginning it holds the text, if any."""
    disk = Disk(out, end)
    if text:
        folder, given = Inode(folder=True), Inode(data=bytearray(text))
        disk.change((disk.root, "data", folder), (folder, "text.txt", given))
        for inode in (disk.root, folder, given):
            disk.sync(inode)
    writer = ""
    with file.open(encoding="latin-1", newline="\n") as lines:
        for line in joined(lines):
            found = LINE.match(line)
            writer = writer or line.split(" ", 1)[0]
            if found and found[3].startswith("1<") and found[1] != writer:
                continue  # what its children print is not announced
            if found and apply(disk, found[2], found[3], int(found[4], 0), found[5]):
                yield disk


def try_kind(name: str, moments: int, draw: random.Random) -> dict[str, object]:
    """Lose writes of one kind at so many moments; what was wrong."""
    kind, faults = KINDS[name], []
    with tempfile.TemporaryDirectory(prefix="lost-writes-") as place:
        top = Path(place)
        out, file = trace(kind, top)
        given = out / "data" / "text.txt"
        text = given.read_bytes() if given.exists() else b""
        states = [*replayed(out, out, file, text)]
        total = len(states)
        if different := states[-1].differs():
            raise SystemExit(f"the model is wrong at its end: {different[:5]}")
        # what is left lies where the writer wrote it: work is known by its path
        whole = out.rename(top / "whole")
        chosen = set(draw.sample(range(total), min(total, moments)))
        tried = 0
        for number, disk in enumerate(replayed(out, whole, file, text)):
            if number not in chosen:
                continue
            for how in (draw.choice(HOW),) if kind.slow else HOW:
                disk.crash(how, draw, out)
                tried += 1
                try:
                    wrong = kind.check(out, disk.said.split("\n")[:-1], whole)
                except Exception as error:
                    wrong = [f"{type(error).__name__}: {error}"]
                faults += [f"after call {number}, {how} lost: {each}" for each in wrong]
                shutil.rmtree(out)
    print(f"{name}: {total} calls, {tried} crashes, {len(faults)} faults", flush=True)
    for fault in faults[:8]:
        print("   ", fault, flush=True)
    return {"kind": name, "calls": total, "crashes": tried, "faults": faults}


def main() -> int:
    """Exit code 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--moments", type=int, default=150, help="of each kind; of data sets a third"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[*KINDS], action="append")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    draw, found = random.Random(given.seed), []
    for name in given.only or KINDS:
        found.append(try_kind(name, given.moments // (3 if KINDS[name].slow else 1), draw))
    if given.json:
        write_json(Path(given.json), {"seed": given.seed, "kinds": found})
    return 1 if any(each["faults"] for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
