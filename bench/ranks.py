"""Times gradient sums of several ranks over networks of given bandwidth and delay; fits and plots a cost model.

    sudo python bench/ranks.py --csv docs/distributed.csv --plot docs/distributed.svg
    sudo python bench/ranks.py --steps     # whole training steps

Each rank runs in a network namespace of its own. All traffic passes through a switch in this process, which sends at
the given bandwidth per rank and holds every packet for the given delay. It needs root, Linux with TUN devices, mpi4py,
MPICH's mpiexec, and for the plot matplotlib. The namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import functools
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
MTU = 9000
NETWORK = "10.77.0"  # of the namespaces alone
NETWORKS = ((100e6, 200e-6), (100e6, 2e-3), (20e6, 2e-3))  # bits per second, seconds one way
SIZES = (4_096, 65_536, 1_048_576)  # bytes of gradients
RANKS = (2, 4, 8)
PREDICTED = (16, 32, 64, 128, 256, 512, 1024)
WIDTH, LAYERS, BATCHES = 512, 6, (256, 1024, 4096)  # of the model whose training steps are timed: 6 MiB of gradients


class Point(NamedTuple):
    """A measured sum: the median of its seconds."""

    bandwidth: float
    delay: float
    ranks: int
    bytes: int
    seconds: float


# ---- the network -----------------------------------------------------------------------------------------------------


class Switch:
    """Network namespaces, joined by a switch with a bandwidth and a delay."""

    def __init__(self, ports: int) -> None:
        self._ports, self._files = ports, list[int]()
        self._bandwidth, self._delay = 1e9, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._forward)

    def __enter__(self) -> Switch:
        try:
            for port in range(self._ports):
                self._add(port)
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._remove()

    def set(self, bandwidth: float, delay: float) -> None:
        self._bandwidth, self._delay = bandwidth, delay

    def _add(self, port: int) -> None:
        name = namespace(port)
        _ip("netns", "add", name)
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._files.append(file)
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        _ip("link", "set", name, "netns", name)
        inside = ("-n", name)
        _ip(*inside, "addr", "add", f"{address(port)}/24", "dev", name)
        _ip(*inside, "link", "set", name, "mtu", str(MTU), "up")
        _ip(*inside, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for port, file in enumerate(self._files):
            os.close(file)
            subprocess.run(["ip", "netns", "del", namespace(port)], check=False)

    def _forward(self) -> None:
        poll = select.poll()
        for file in self._files:
            poll.register(file, select.POLLIN)
        free = [0.0] * self._ports  # when each port has sent what it has received
        waiting: list[tuple[float, int, int, bytes]] = []  # arrival, order, port, packet
        order = 0
        while not self._stop.is_set():
            pause = waiting[0][0] - time.monotonic() if waiting else 0.1
            for file, _ in poll.poll(max(0.0, pause * 1000)):
                with contextlib.suppress(BlockingIOError):
                    while packet := os.read(file, 65536):
                        port = self._port(packet)
                        if port is None:
                            continue
                        sender = self._files.index(file)
                        now = time.monotonic()
                        free[sender] = max(now, free[sender]) + 8 * len(packet) / self._bandwidth
                        order += 1
                        heapq.heappush(waiting, (free[sender] + self._delay, order, port, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, port, packet = heapq.heappop(waiting)
                with contextlib.suppress(BlockingIOError):  # a full queue drops packets, as real ones do
                    os.write(self._files[port], packet)

    def _port(self, packet: bytes) -> int | None:
        """The port that an IPv4 packet goes to."""
        if len(packet) < 20 or packet[0] >> 4 != 4:
            return None
        port = packet[19] - 1
        return port if packet[16:19] == bytes(map(int, NETWORK.split("."))) and port < self._ports else None


def namespace(port: int) -> str:
    return f"rgrank{port}"


def address(port: int) -> str:
    return f"{NETWORK}.{port + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def launcher() -> Iterator[str]:
    """A program that mpiexec calls as it would call ssh: with options, a host and a command."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as file:
        file.write(
            "#!/bin/sh\n"
            f'while [ "${{1#{NETWORK}.}}" = "$1" ]; do shift; done\n'
            f"port=$((${{1#{NETWORK}.}} - 1)); shift\n"
            f'exec ip netns exec {namespace(0)[:-1]}$port sh -c "$*"\n'
        )
    os.chmod(file.name, 0o755)
    try:
        yield file.name
    finally:
        os.unlink(file.name)


# ---- a rank ----------------------------------------------------------------------------------------------------------


def add(rounds: int) -> None:
    """Time sums of every size; rank 0 prints the medians."""
    from retrograd import distributed

    group = distributed.world(8)
    for size in SIZES:
        parts = [np.ones(size // 4, np.float32) for _ in group.local]
        total = np.empty(size // 4, np.float32)
        times = []
        for _ in range(rounds + 2):
            group.run(lambda _: None)  # a barrier
            start = time.perf_counter()
            group.sum(parts, total)
            times.append(max(group.run(lambda _, start=start: time.perf_counter() - start)))
        if group.rank == 0:
            print(json.dumps([size, float(np.median(times[2:]))]), flush=True)


def seconds_of_gradients(x: np.ndarray, target: np.ndarray, shard: Any) -> float:
    """Forward and backward of a shard of the batch."""
    part, share = shard.part(len(x)), shard.share(len(x))
    start = time.perf_counter()
    shard.step(x[part], target[part], share=share)
    return time.perf_counter() - start


def train(rounds: int) -> None:
    """Time training steps; rank 0 prints the medians."""
    from retrograd import distributed, nn

    group = distributed.world(8)
    rng = np.random.default_rng(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, rng=rng) for _ in range(LAYERS)))
    parallel = distributed.DataParallel(model, group, nn.MeanSquaredError(), nn.SGD(model, 1e-3))
    for batch in BATCHES:
        x, target = rng.standard_normal((2, batch, WIDTH), dtype=np.float32)
        times = []
        for _ in range(rounds + 2):
            group.run(lambda _: None)  # a barrier
            start = time.perf_counter()
            gradients = max(parallel.run(functools.partial(seconds_of_gradients, x, target)))
            times.append((time.perf_counter() - start, gradients))
        whole, gradients = np.median(times[2:], axis=0)
        if group.rank == 0:
            print(json.dumps([batch, whole, gradients]), flush=True)


def run_ranks(ssh: str, ranks: int, *arguments: str) -> list[list[float]]:
    """Run this file on so many ranks, and return the lines that rank 0 prints."""
    hosts = ",".join(address(port) for port in range(ranks))
    output = subprocess.run(
        [
            *("ip", "netns", "exec", namespace(0), str(Path(sys.executable).parent / "mpiexec")),
            *("-launcher", "ssh", "-launcher-exec", ssh, "-localhost", address(0)),
            *("-hosts", hosts, "-n", str(ranks), "-ppn", "1"),
            *("-genv", "UCX_TLS", "tcp,self", "-genv", "RETROGRAD_NUM_THREADS", "1"),
            *("-genv", "MPIR_CVAR_CH4_PROGRESS_THROTTLE", "1", "-genv", "MPIR_CVAR_NOLOCAL", "1"),
            *(sys.executable, __file__, *arguments),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def measure(rounds: int) -> list[Point]:
    points = []
    with Switch(max(RANKS)) as switch, launcher() as ssh:
        for bandwidth, delay in NETWORKS:
            for ranks in RANKS:
                switch.set(bandwidth, delay)
                for size, seconds in run_ranks(ssh, ranks, "--rank", "sums", "--rounds", str(rounds)):
                    points.append(Point(bandwidth, delay, ranks, int(size), seconds))
                    print(
                        f"{bandwidth / 1e6:5.0f} Mbit/s {delay * 1e6:4.0f} µs {ranks} ranks {int(size):>8} bytes "
                        f"{seconds * 1e3:8.2f} ms",
                        flush=True,
                    )
    return points


def measure_steps(rounds: int) -> None:
    print("ranks  batch  step ms  of it gradients")
    with Switch(max(RANKS)) as switch, launcher() as ssh:
        switch.set(*NETWORKS[0])
        for ranks in RANKS:
            for batch, whole, gradients in run_ranks(ssh, ranks, "--rank", "steps", "--rounds", str(rounds)):
                print(f"{ranks:5} {batch:6.0f} {whole * 1e3:8.0f} {gradients * 1e3:16.0f}", flush=True)


# ---- the model -------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Seconds of a sum of n bytes by R ranks: rounds(R) a + 2 n (R - 1) / R b."""

    a: float  # of a round
    b: float  # of a byte

    def seconds(self, ranks: int, size: int) -> float:
        return rounds_of(ranks) * self.a + 2 * size * (ranks - 1) / ranks * self.b


def rounds_of(ranks: int) -> float:
    """Messages that wait for one another: the slices go to all ranks at once, the sums from rank to rank."""
    return 1 + (ranks - 1)


def fit(points: Sequence[Point]) -> Cost:
    """Least squares of relative errors."""
    rows = np.array([[rounds_of(p.ranks), 2 * p.bytes * (p.ranks - 1) / p.ranks] for p in points])
    seconds = np.array([p.seconds for p in points])
    a, b = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(points)), rcond=None)[0]
    return Cost(max(a, 0.0), b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", choices=("sums", "steps"), help=argparse.SUPPRESS)
    parser.add_argument("--steps", action="store_true", help="time training steps instead")
    parser.add_argument("--rounds", type=int, default=20, help="sums of each size (default: 20)")
    parser.add_argument("--csv", metavar="FILE", help="write the measured points")
    parser.add_argument("--read", metavar="FILE", help="read points that --csv wrote, instead of measuring")
    parser.add_argument("--plot", metavar="FILE", help="draw points and model, .svg or .png")
    options = parser.parse_args()
    if options.rank:
        {"sums": add, "steps": train}[options.rank](options.rounds)
        return
    if options.steps:
        measure_steps(options.rounds)
        return
    if options.read:
        with open(options.read, newline="") as file:
            points = [
                Point(float(r["bandwidth"]), float(r["delay"]), int(r["ranks"]), int(r["bytes"]), float(r["seconds"]))
                for r in csv.DictReader(file)
            ]
    else:
        points = measure(options.rounds)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Point._fields)
            writer.writerows(points)
    print_model(points)
    if options.plot:
        draw(points, options.plot)


def print_model(points: Sequence[Point]) -> None:
    for network in dict.fromkeys((p.bandwidth, p.delay) for p in points):
        here = [p for p in points if (p.bandwidth, p.delay) == network]
        cost = fit(here)
        errors = [cost.seconds(p.ranks, p.bytes) / p.seconds - 1 for p in here]
        print(
            f"{network[0] / 1e6:.0f} Mbit/s, {network[1] * 1e6:.0f} µs: a {cost.a * 1e6:.0f} µs a round, "
            f"b {8 / cost.b / 1e6:.0f} Mbit/s; error of the model {min(errors):+.0%} to {max(errors):+.0%}"
        )


def draw(points: Sequence[Point], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    networks = list(dict.fromkeys((p.bandwidth, p.delay) for p in points))
    figure, axes = pyplot.subplots(1, len(networks), figsize=(4 * len(networks), 4), sharey=True, squeeze=False)
    for axis, network in zip(axes[0], networks, strict=True):
        here = [p for p in points if (p.bandwidth, p.delay) == network]
        cost = fit(here)
        for number, size in enumerate(SIZES):
            measured = [(p.ranks, p.seconds * 1e3) for p in here if p.bytes == size]
            color = f"C{number}"
            axis.plot(*zip(*measured, strict=True), "o", color=color)
            ranks = (*RANKS, *PREDICTED)
            axis.plot(ranks, [cost.seconds(r, size) * 1e3 for r in ranks], color=color, label=_bytes(size))
        axis.axvspan(max(RANKS), max(PREDICTED), color="0.93", zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="ranks", xticks=(2, 8, 32, 128, 1024))
        axis.set_xticklabels(["2", "8", "32", "128", "1024"])
        axis.set_title(f"{network[0] / 1e6:.0f} Mbit/s, {network[1] * 1e6:.0f} µs")
        axis.grid(True, alpha=0.3)
    axes[0][0].set_ylabel("milliseconds per sum")
    axes[0][0].legend(title="gradients", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


if __name__ == "__main__":
    main()
