"""Two hosts on one machine: ``torchrun --nnodes 2`` between two network namespaces.

A veth pair joins the namespaces. ``tc`` shapes its rate (tbf) and its delay (netem); where the
kernel has no netem, packets go through a relay of this script instead (a TUN device in each
namespace), which holds them back. Of every link the ranks' own probe, their iteration, and the
prediction from the probe and from processes that exchange nothing are measured in the same
launch. Then a rank, a host and the link are lost while a model trains, and training is resumed.

Needs root, ``ip``, ``tc`` and TorchRec; what is not there ends the script in one sentence.

    python benchmarks/hosts.py --json benchmarks/results/hosts.json
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_core.base.engines import engine
from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.files import write_json
from dlrm_core.config import Parameters, load_parameters
from dlrm_studies.scaling.launch import RanksFailed
from dlrm_studies.scaling.measure import Effort, measure_scaling
from dlrm_studies.scaling.model.links import calibrate
from dlrm_studies.scaling.model.record import predicted_and_measured, record_of
from dlrm_workbook.ground.machine import machine_facts

HOSTS = ("dlrm-host-a", "dlrm-host-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICES = ("dlrm-a", "dlrm-b")
PORT = 29577
MOST_RELAYED = 5.0
"""Gbit/s that the relay, a Python process, is asked to move at most."""

MODEL = (
    *("model.table_rows=100000", "data.generator=uniform", "training.device=cpu"),
    *("training.threads=1", "training.rank_timeout_s=20", "training.batch_size=256"),
)
"""What is trained: Kalamkar's Small with small tables, one thread a rank."""


@dataclass(frozen=True)
class LinkShape:
    """What a link between the hosts is made to be."""

    gbit_per_s: float
    delay_ms: float


def run(*words: str, check: bool = True) -> str:
    """Standard output of a command of iproute2.

    Raises:
        InputError: it failed, with what it said.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise InputError(f"`{' '.join(words)}` failed: {said[0] if said else done.returncode}")
    return done.stdout


def inside(host: int) -> list[str]:
    """What stands before a command that runs on a host."""
    named = ["unshare", "--uts", "sh", "-c", f'hostname {HOSTS[host]}; exec "$@"', "sh"]
    return ["ip", "netns", "exec", HOSTS[host], *named]


@contextlib.contextmanager
def two_hosts(shape: LinkShape) -> Iterator[str]:
    """Both namespaces and their link, in the shape asked for; says how it was made.

    Raises:
        InputError: this system makes no namespaces or no such link.
    """
    remove_hosts()
    try:
        for host in HOSTS:
            run("ip", "netns", "add", host)
            run("ip", "-n", host, "link", "set", "lo", "up")
        netem = netem_works()
        if netem or shape.delay_ms <= 0.05:
            yield with_veth(shape, netem)
        elif shape.gbit_per_s > MOST_RELAYED:
            raise InputError(
                "this kernel has no netem, and the relay in its place, a Python process, is not "
                f"asked for more than {MOST_RELAYED:g} Gbit/s"
            )
        else:
            with relayed(shape):
                yield "TUN devices and a relay in user space, which holds packets back"
    finally:
        remove_hosts()


def remove_hosts() -> None:
    """Delete the namespaces, their devices and whatever still runs in them."""
    for host in HOSTS:
        for process in run("ip", "netns", "pids", host, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        run("ip", "netns", "del", host, check=False)


def netem_works() -> bool:
    """Whether this kernel can delay packets."""
    tried = ("tc", "-n", HOSTS[0], "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    done = subprocess.run(tried, capture_output=True, check=False)
    run("tc", "-n", HOSTS[0], "qdisc", "del", "dev", "lo", "root", check=False)
    return done.returncode == 0


def with_veth(shape: LinkShape, netem: bool) -> str:
    """Join the hosts by a veth pair that ``tc`` shapes on both ends."""
    pair = ("type", "veth", "peer", "name", DEVICES[1], "netns", HOSTS[1])
    run("ip", "link", "add", DEVICES[0], "netns", HOSTS[0], *pair)
    rate = f"{shape.gbit_per_s * 1e3:.0f}mbit"
    # what the bucket holds must last until the kernel's next tick
    burst = max(262_144, int(shape.gbit_per_s * 1e9 / 8 / 250))
    for host, (device, address) in enumerate(zip(DEVICES, ADDRESSES, strict=True)):
        run("ip", "-n", HOSTS[host], "addr", "add", f"{address}/24", "dev", device)
        run("ip", "-n", HOSTS[host], "link", "set", device, "up")
        add = ("tc", "-n", HOSTS[host], "qdisc", "add", "dev", device)
        tbf = ("tbf", "rate", rate, "burst", str(burst), "latency", "50ms")
        if netem and shape.delay_ms > 0.05:
            run(*add, "root", "handle", "1:", "netem", "delay", f"{shape.delay_ms}ms")
            run(*add, "parent", "1:", *tbf)
        else:
            run(*add, "root", *tbf)
    return "veth pair, tc tbf" + (" and netem" if netem and shape.delay_ms > 0.05 else "")


# ---- the relay ---------------------------------------------------------------------------

CLONE_NEWNET, TUNSETIFF, TUN_NO_PI = 0x40000000, 0x400454CA, 0x1001


def tun_of(host: int) -> int:
    """A TUN device in a host's namespace, by its file descriptor."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(f"/run/netns/{HOSTS[host]}", os.O_RDONLY)
    setns = ctypes.CDLL(None, use_errno=True).setns
    if setns(other, CLONE_NEWNET):
        raise InputError(f"{HOSTS[host]} cannot be entered: {os.strerror(ctypes.get_errno())}")
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICES[host].encode(), TUN_NO_PI))
    finally:
        setns(own, CLONE_NEWNET)
        os.close(own)
        os.close(other)
    return device


@contextlib.contextmanager
def relayed(shape: LinkShape) -> Iterator[None]:
    """Join the hosts by two TUN devices and a process that carries packets between them."""
    devices = [tun_of(host) for host in range(2)]
    for host, (device, address) in enumerate(zip(DEVICES, ADDRESSES, strict=True)):
        run("ip", "-n", HOSTS[host], "link", "set", device, "mtu", "65500", "up")
        run("ip", "-n", HOSTS[host], "addr", "add", f"{address}/24", "dev", device)
    child = os.fork()
    if child == 0:
        carry(devices, shape)
    for device in devices:
        os.close(device)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def carry(devices: Sequence[int], shape: LinkShape) -> None:
    """Carry packets for ever, each as late as a link of this rate and delay would."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    per_byte, delay = 8e-9 / shape.gbit_per_s, shape.delay_ms / 1e3
    free_at, late, number = [0.0, 0.0], [], 0
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select(devices, [], [], wait)
        now = time.monotonic()
        for device in ready:
            end = devices.index(device)
            packet = os.read(device, 65535)
            free_at[end] = max(now, free_at[end]) + len(packet) * per_byte
            number += 1
            heapq.heappush(late, (free_at[end] + delay, number, 1 - end, packet))
        while late and late[0][0] <= now:
            _, _, end, packet = heapq.heappop(late)
            with contextlib.suppress(OSError):
                os.write(devices[end], packet)


# ---- ranks on the hosts ------------------------------------------------------------------


def torchrun(host: int, module: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start torchrun with one rank on a host, its output in a file."""
    words = [*inside(host), sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    words += ["--nproc-per-node", "1", "--max-restarts", "0", "--rdzv-backend", "c10d"]
    words += ["--rdzv-id", "dlrm", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"]
    # a name of the machine says nothing of its namespaces
    words += ["--rdzv-conf", f"is_host={1 - host}", "--local-addr", ADDRESSES[host], *module]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": DEVICES[host], "OMP_NUM_THREADS": "1"}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("wb") as output:
        return subprocess.Popen(
            words, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def on_both(module: Sequence[str], folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start a module as one rank on each host; logs are ``0.log`` and ``1.log``."""
    return [torchrun(host, module, folder / f"{host}.log") for host in range(2)]


def last_words(log: Path) -> str:
    """The sentence that a rank ended with: its last line of ours, else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line for line in lines if re.match(r"dlrm \w+: ", line)]
    return (ours or lines or ["nothing"])[-1][:500]


def launch(
    command: Sequence[Any],
    ranks: int,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    on_iteration: Callable[[int], None] = lambda done: None,
) -> None:
    """Run a command as a rank on each host, as ``run_ranks`` does on one.

    Raises:
        RanksFailed: one failed, or the time was over.
    """
    with tempfile.TemporaryDirectory(prefix="dlrm-hosts-") as name:
        folder = Path(name)
        started = on_both([str(word) for word in command[1:]], folder)
        until = time.monotonic() + timeout_s
        while any(process.poll() is None for process in started) and time.monotonic() < until:
            time.sleep(0.2)
        bad = [host for host, process in enumerate(started) if process.poll() != 0]
        if bad:
            raise RanksFailed(f"{HOSTS[bad[0]]}: {last_words(folder / f'{bad[0]}.log')}")


SERVER = """
import socket
listening = socket.create_server(("", 5001), family=socket.AF_INET)
print("listening", flush=True)
connection, _ = listening.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(50):
    connection.sendall(connection.recv(1))
while connection.recv(1 << 20):
    pass
"""

CLIENT = """
import socket, statistics, sys, time
connection = socket.create_connection((sys.argv[1], 5001))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(50):
    begun = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    times.append(time.perf_counter() - begun)
begun, sent, data = time.perf_counter(), 0, b"x" * (1 << 20)
while time.perf_counter() - begun < 2:
    connection.sendall(data)
    sent += len(data)
print(1e3 * statistics.median(times), 8e-9 * sent / (time.perf_counter() - begun))
"""


def plain_tcp() -> tuple[float, float]:
    """Round trip of one byte, ms, and Gbit/s of a stream from the first host to the second."""
    server = subprocess.Popen(
        [*inside(1), sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    server.stdout.readline()
    client = run(*inside(0), sys.executable, "-c", CLIENT, ADDRESSES[1])
    server.wait(timeout=60)
    round_trip, rate = map(float, client.split())
    return round_trip, rate


def measured(parameters: Parameters, shape: LinkShape, rounds: int) -> list[dict[str, Any]]:
    """One link: what its probe found, and each run beside its prediction."""
    about: dict[str, Any] = {"gbit_per_s": shape.gbit_per_s, "delay_ms": shape.delay_ms}
    try:
        with two_hosts(shape) as how:
            round_trip, stream = plain_tcp()
            effort = Effort(rounds=rounds, iterations=4, probe=3, timeout_s=400)
            document = measure_scaling(parameters, (2,), effort=effort, launch=launch)
    except (InputError, RanksFailed) as error:
        return [about | {"not_measured": str(error)}]
    for row in document["runs"]:
        row["nodes"] = 2
    record = record_of(document)
    link = calibrate(record.link_probe, "measured")
    about |= {
        "made_by": how,
        "round_trip_ms": round_trip,
        "stream_gbit_per_s": stream,
        "probe_latency_ms": link.alpha_us.mid * 1e-3,
        "probe_gbit_per_s": 8 * link.gb_per_s.mid,
    }
    checked = predicted_and_measured(record, parameters)
    scaling = {row["run"]: row["scaling"] for row in document["runs"]}
    return [about | row | {"scaling": scaling[row["run"]]} for row in checked.to_dict("records")]


# ---- what is lost while a model trains ---------------------------------------------------


def ranks_of_hosts(hosts: Sequence[str] = HOSTS) -> list[int]:
    """Process numbers of the ranks that live; torchrun, which started them, is none."""
    pids = [int(pid) for host in hosts for pid in run("ip", "netns", "pids", host).split()]
    lines = {pid: command_line(pid) for pid in pids}
    return [pid for pid, line in lines.items() if line and b"torch.distributed.run" not in line]


def lose_rank() -> None:
    """Kill the rank of the second host; its torchrun stays."""
    for pid in ranks_of_hosts(HOSTS[1:]):
        os.kill(pid, signal.SIGKILL)


def lose_host() -> None:
    """Kill everything that runs on the second host, and take its link away."""
    lose_link()
    for pid in run("ip", "netns", "pids", HOSTS[1]).split():
        os.kill(int(pid), signal.SIGKILL)


def lose_link() -> None:
    """Take the link down; both hosts go on."""
    run("ip", "-n", HOSTS[1], "link", "set", DEVICES[1], "down")


def command_line(pid: int) -> bytes:
    """A process's command; empty when it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


LOSSES: dict[str, Callable[[], None]] = {"rank": lose_rank, "host": lose_host, "link": lose_link}


def lost(what: str, shape: LinkShape) -> dict[str, Any]:
    """Train, lose something, and resume: what was said, after how long, and where it went on."""
    about: dict[str, Any] = {"lost": what}
    with tempfile.TemporaryDirectory(prefix="dlrm-hosts-") as name:
        folder = Path(name)
        module = ["-m", "dlrm_core", "train", "-f", "kalamkar_small"]
        for leaf in (*MODEL, "training.checkpoint_every=5"):
            module += ["-p", leaf]
        checkpoints = folder / "output" / "checkpoint"
        with two_hosts(shape):
            long = [*module, "-p", "training.batches=100000", "--output", str(folder / "output")]
            started = on_both(long, folder)
            until = time.monotonic() + 120
            while not list(checkpoints.glob("step-*")) and time.monotonic() < until:
                time.sleep(0.2)
            if not list(checkpoints.glob("step-*")):
                return about | {"not_measured": f"it did not start: {last_words(folder / '0.log')}"}
            LOSSES[what]()
            begun = time.monotonic()
            while ranks_of_hosts() and time.monotonic() < begun + 120:
                time.sleep(0.2)
            about |= {
                "ranks_ended_after_s": round(time.monotonic() - begun, 1),
                "ranks_left": len(ranks_of_hosts()),
            }
            while any(p.poll() is None for p in started) and time.monotonic() < begun + 60:
                time.sleep(0.2)
            about |= {
                "torchrun_left": sum(process.poll() is None for process in started),
                "said": [last_words(folder / f"{host}.log") for host in range(2)],
            }
        step = max(int(path.name.split("-")[1]) for path in checkpoints.glob("step-*"))
        with two_hosts(shape):
            rest = ["-p", f"training.batches={step + 10}", "--resume", "latest"]
            started = on_both([*module, *rest, "--output", str(folder / "output")], folder)
            for process in started:
                process.wait(timeout=120)
            lines = (folder / "0.log").read_text() + (folder / "1.log").read_text()
            done = [json.loads(line) for line in lines.splitlines() if line.startswith('{"')]
    result = done[-1] if done else {}
    return about | {
        "checkpoint_step": step,
        "resumed_at": result.get("first_iteration"),
        "status": result.get("status", "it did not resume"),
    }


def main() -> int:
    """Measure every link, lose everything once, and print two tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--gbit", default="1,5,25", metavar="N,...", help="default: %(default)s")
    parser.add_argument("--delay", default="0.05,1", metavar="MS,...", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--lose", default="rank,host,link", metavar="WHAT,...")
    arguments = parser.parse_args()
    try:
        engine("several ranks: plan").require_torchrec()
        with two_hosts(LinkShape(1.0, 0.05)):
            pass
    except (InputError, MissingToolError, OSError) as error:
        print(f"no two hosts can be made here: {error}", file=sys.stderr)
        return 2
    parameters = load_parameters("kalamkar_small", MODEL)
    document: dict[str, Any] = {
        "command": f"python benchmarks/hosts.py {' '.join(sys.argv[1:])}",
        "machine": machine_facts(),
        "links": [],
        "lost": [],
    }
    for delay in map(float, filter(None, arguments.delay.split(","))):
        for rate in map(float, filter(None, arguments.gbit.split(","))):
            for row in measured(parameters, LinkShape(rate, delay), arguments.rounds):
                document["links"].append(row)
                print(json.dumps(row), flush=True)
                write_json(arguments.json, document)
    for what in filter(None, arguments.lose.split(",")):
        document["lost"].append(lost(what, LinkShape(5.0, 0.05)))
        print(json.dumps(document["lost"][-1]), flush=True)
        write_json(arguments.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
