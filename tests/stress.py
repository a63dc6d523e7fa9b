"""retrograd under stress: many threads, forks, exits, kills and too little memory, one after the other.

    python tests/stress.py                 # 64 threads for a minute, everything in about three
    python tests/stress.py --seconds 40    # each part gets its share, and does the least that it has to
    python tests/stress.py --only forks exits

Each part runs in a process of its own and either keeps its promise or fails with a reason; the lines at the end say
which. The exit code is 0 if all held. How often a part is repeated depends on its time, what it asserts does not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import retrograd as rg

Array = np.ndarray[Any, Any]
HANG = 300.0  # seconds: what takes that long hangs


class Failed(Exception):
    """A promise that was not kept."""


# ---- what is computed ------------------------------------------------------------------------------------------------


def numbers(*shape: int) -> Array:
    return np.random.default_rng([7, *shape]).standard_normal(shape, dtype=np.float32)


def norms(kind: str, **options: Any) -> Callable[[int], list[Any]]:
    x, dy = numbers(8, 12, 17, 19), numbers(8, 12, 17, 19)[::-1]
    gamma, beta = (numbers(19), numbers(19)[::-1]) if kind == "layer" else (numbers(12), numbers(12)[::-1])

    def work(threads: int) -> list[Any]:
        forward, backward = getattr(rg, f"{kind}_norm_forward"), getattr(rg, f"{kind}_norm_backward")
        y, cache = forward(x, gamma, beta, activation="tanh", num_threads=threads, **options)
        return [y, cache.mean, cache.var, *backward(dy, cache, num_threads=threads)]

    return work


def lstm(steps: int, samples: int, inputs: int, units: int, **options: Any) -> Callable[[int], list[Any]]:
    weights = rg.LstmWeights(0.2 * numbers(4 * units, inputs), 0.2 * numbers(4 * units, units), numbers(4 * units))
    x, dy = numbers(steps, samples, inputs), numbers(steps, samples, units)
    if "table" in options:
        x = np.random.default_rng(3).integers(0, len(options["table"]), (steps, samples))

    def work(threads: int) -> list[Any]:
        y, hn, cn, cache = rg.lstm_forward(x, weights, num_threads=threads, **options)
        dx, dweights, _, _ = rg.lstm_backward(dy, cache, num_threads=threads)
        return [y, hn, cn, dx, *dweights[:3]]

    return work


def linear(threads: int) -> list[Any]:
    x, w, b = numbers(60, 70), numbers(50, 70), numbers(50)
    y = rg.linear_forward(x, w, b, num_threads=threads)
    return [y, *rg.linear_backward(y, x, w, num_threads=threads)]


def embedding(threads: int) -> list[Any]:
    indices = np.random.default_rng(5).integers(0, 40, (30, 20))
    y = rg.embedding_forward(indices, numbers(40, 33), num_threads=threads)
    return [y, rg.embedding_backward(y, indices, 40, num_threads=threads)]


def losses(threads: int) -> list[Any]:
    logits, labels = numbers(200, 90), np.random.default_rng(6).integers(0, 90, 200)
    return [
        *rg.softmax_cross_entropy(logits, labels, label_smoothing=0.1, num_threads=threads),
        *rg.mean_squared_error(logits, logits[::-1].copy(), reduction="none", num_threads=threads),
        *rg.huber(logits, logits[::-1].copy(), num_threads=threads),
    ]


def elementwise(threads: int) -> list[Any]:
    x = numbers(100, 333)
    return [
        rg.activation_forward(x, "gelu", num_threads=threads),
        rg.activation_backward(x, "gelu", x=x, num_threads=threads),
        rg.dropout(x, 0.4, seed=9, num_threads=threads),
        rg.global_norm([x, x[::2]], num_threads=threads),
    ]


def optimizers(threads: int) -> list[Any]:
    states = [[numbers(70, 80), numbers(99)] for _ in range(5)]
    parameters, gradients, first, second, velocities = states
    second = [np.abs(array) for array in second]
    rg.adam_step(parameters, gradients, first, second, step=3, maximum_norm=1.0, num_threads=threads)
    rg.sgd_step(parameters, gradients, velocities, learning_rate=0.1, momentum=0.9, num_threads=threads)
    rg.rmsprop_step(parameters, gradients, second, num_threads=threads)
    return [*parameters, *first, *second, *velocities]


WORK: dict[str, Callable[[int], list[Any]]] = {
    "batch norm": norms("batch"),
    "instance norm": norms("instance"),
    "layer norm": norms("layer"),
    "group norm": norms("group", num_groups=3),
    "lstm": lstm(12, 20, 24, 40),
    "ragged lstm": lstm(9, 5, 8, 17, lengths=[9, 1, 0, 4, 9]),
    "lstm of a table": lstm(12, 20, 24, 40, table=numbers(30, 24)),
    "linear": linear,
    "embedding": embedding,
    "losses": losses,
    "elementwise": elementwise,
    "optimizers": optimizers,
}


def same(got: list[Any], expected: list[Any]) -> bool:
    return len(got) == len(expected) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(got, expected, strict=True)
    )


# ---- the parts: each runs for some seconds, yields what it has done so far, and raises Failed ------------------------

Progress = Iterator[str]


def threads(seconds: float) -> Progress:
    """64 Python threads call everything on shared inputs, with 1 to 4 threads each: the bits of one thread alone."""
    expected = {name: work(1) for name, work in WORK.items()}
    names, end = sorted(WORK), time.monotonic() + seconds
    faults: list[str] = []
    calls = [0] * 64

    def repeat(number: int) -> None:
        order = random.Random(number)
        try:
            while time.monotonic() < end and not faults:
                name = order.choice(names)
                if not same(WORK[name](order.randint(1, 4)), expected[name]):
                    faults.append(f"{name} gave other bits in thread {number}")
                calls[number] += 1
        except BaseException as error:
            faults.append(f"thread {number}: {error!r}")

    workers = [threading.Thread(target=repeat, args=(number,), daemon=True) for number in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():
            worker.join(1)
            yield f"{sum(calls)} calls"
            if time.monotonic() > end + HANG:
                raise Failed("threads hang")
    if faults:
        raise Failed(faults[0])
    yield f"{sum(calls)} calls in 64 threads"


def indices(seconds: float) -> Progress:
    """One thread writes nonsense into the indices that others look up: a refusal or a result, nothing else."""
    end, shared, stop = time.monotonic() + seconds, np.zeros((40, 30), np.int64), threading.Event()
    table, logits, dy = numbers(20, 16), numbers(40, 30, 20), numbers(40, 30, 16)
    weights = rg.LstmWeights(numbers(32, 16), numbers(32, 8))
    nonsense = [0, 19, 20, -1, 2**31, -(2**62), 2**62]

    def scribble() -> None:
        order = random.Random(1)
        while not stop.is_set():
            for value in (order.choice(nonsense), 0):  # so that many checks find nothing wrong
                shared[order.randrange(40), :] = value
                for _ in range(order.randrange(100)):
                    pass
            shared[...] = 0

    writer = threading.Thread(target=scribble, daemon=True)
    writer.start()
    done = refused = 0
    try:
        while time.monotonic() < end:
            for call in (
                lambda: rg.embedding_forward(shared, table, num_threads=2),
                lambda: rg.embedding_backward(dy, shared, 20, num_threads=2),
                lambda: rg.softmax_cross_entropy(logits, shared, num_threads=2),
                lambda: rg.lstm_forward(shared, weights, table=table, num_threads=2),
            ):
                try:
                    call()
                    done += 1
                except ValueError:
                    refused += 1
            yield f"{done} results, {refused} refusals"
    finally:
        stop.set()
        writer.join()


def forks(seconds: float) -> Progress:
    """Forks from a process whose threads are inside kernels; children and their children compute, and exit with 0."""
    expected = {name: work(1) for name, work in WORK.items()}
    names, end, stop = sorted(WORK), time.monotonic() + seconds, threading.Event()

    def busy(number: int) -> None:
        order = random.Random(number)
        while not stop.is_set():
            WORK[order.choice(names)](order.randint(1, 4))

    def child(depth: int, order: random.Random) -> int:
        """Returns the exit code."""
        for name in order.sample(names, 3):
            if not same(WORK[name](order.randint(1, 4)), expected[name]):
                return 3
        return wait_for(fork(depth - 1, order)) if depth else 0

    def fork(depth: int, order: random.Random) -> int:
        pid = os.fork()
        if pid == 0:
            code = 4
            try:
                signal.alarm(int(HANG))
                code = child(depth, order)
            finally:
                os._exit(code)
        return pid

    def wait_for(pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    workers = [threading.Thread(target=busy, args=(number,), daemon=True) for number in range(4)]
    for worker in workers:
        worker.start()
    order, children = random.Random(0), 0
    try:
        while time.monotonic() < end:
            for pid in [fork(order.randint(0, 4), random.Random(children + k)) for k in range(3)]:
                children += 1
                code = wait_for(pid)
                if code:
                    raise Failed(f"child {children} ended with {code}")
            yield f"{children} children"
    finally:
        stop.set()
        for worker in workers:
            worker.join()


EXIT = """
import sys, threading
sys.path.insert(0, {tests!r})
import stress
began = [threading.Event() for _ in range(4)]
def busy(number, name):
    stress.WORK[name](1 + number)
    began[number].set()
    while True:
        stress.WORK[name](1 + number)
for number, name in enumerate({names!r}):
    threading.Thread(target=busy, args=(number, name), daemon=True).start()
for event in began:
    event.wait()
"""


def exits(seconds: float) -> Progress:
    """The interpreter ends while daemon threads are inside kernels: with 0, and without a word."""
    end, order, count, bad = time.monotonic() + seconds, random.Random(0), 0, []
    while count < 20 or time.monotonic() < end:
        names = order.sample(sorted(WORK), 4)
        done = script(EXIT.format(tests=str(Path(__file__).parent), names=names))
        count += 1
        if done.returncode or done.stderr:
            bad.append(f"{done.returncode}: {last_line(done.stderr)}")
        yield f"{count} exits, {len(bad)} not with 0"
    if bad:
        raise Failed(f"{len(bad)} of {count} exits; the first {bad[0]}")


MEMORY = """
import resource, sys
sys.path.insert(0, {tests!r})
import stress
for work in stress.WORK.values():  # threads, and what Python needs, are there before the limit is
    work({threads})
stress.rg.release_memory()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + ({room} << 10),) * 2)
print("limited", flush=True)
outcomes = set()
def large(threads):
    stress.lstm(30, 64, 128, 256)(threads)
    stress.rg.batch_norm_forward(stress.numbers(64, 32, 30, 30), num_threads=threads)
    stress.rg.linear_forward(stress.numbers(900, 800), stress.numbers(700, 800), num_threads=threads)
for work in [large, *stress.WORK.values()]:
    try:
        work({threads})
        outcomes.add("result")
    except MemoryError:
        outcomes.add("MemoryError")
print(*sorted(outcomes))
"""


def memory(seconds: float) -> Progress:
    """Under a limit of memory, with 2 and 4 threads: a result or a MemoryError, never the end of the process."""
    end, order, counts, bad = time.monotonic() + seconds, random.Random(0), {"result": 0, "MemoryError": 0}, []
    number = 0
    while number < 20 or time.monotonic() < end:
        room = 2 ** order.uniform(7, 16)  # KiB: from nothing at all to enough for everything
        options = {"tests": str(Path(__file__).parent), "threads": 2 + 2 * (number % 2), "room": int(room)}
        done = script(MEMORY.format(**options))
        number += 1
        if done.returncode == 0:
            for word in done.stdout.split()[1:]:
                counts[word] += 1
        elif "limited" not in done.stdout or "MemoryError" not in done.stderr or done.returncode != 1:
            # Python itself may run out of memory between the calls; anything else is ours.
            bad.append(f"{options['threads']} threads, {int(room)} KiB: {done.returncode}: {last_line(done.stderr)}")
        yield f"{number} runs, {counts['MemoryError']} with a MemoryError, {len(bad)} ended"
    if bad:
        raise Failed(f"{len(bad)} of {number} runs; the first {bad[0]}")
    if not counts["MemoryError"] or not counts["result"]:
        raise Failed(f"the limits were of no use: {counts}")


TEAM = """
import sys
sys.path.insert(0, {tests!r})
import os, stress
def switches():
    total = 0
    for task in os.listdir("/proc/self/task"):
        for line in open(f"/proc/self/task/{{task}}/status"):
            if line.startswith(("voluntary_ctxt", "nonvoluntary_ctxt")):
                total += int(line.split()[1])
    return total
x = stress.numbers(20_000, 100)
def work(threads):
    return [stress.rg.layer_norm_forward(x, num_threads=threads)[0]]
expected = work(1)
def count(calls):
    before = switches()
    for _ in range(calls):
        assert stress.same(work(2), expected)
    return (switches() - before) / calls
count(5)
alone = count(20)
try:
    work({many})
except ValueError as error:
    print("refused:", error)
print(alone, count(20), len(os.listdir("/proc/self/task")))
"""


def teams(seconds: float) -> Progress:
    """After a call with many threads, calls with two wake no more of them than before."""
    end, many, least = time.monotonic() + seconds, 1024, []
    while not least or time.monotonic() < end:
        done = script(TEAM.format(tests=str(Path(__file__).parent), many=many))
        if done.returncode:
            raise Failed(f"{done.returncode}: {last_line(done.stderr)}")
        before, after, alive = map(float, done.stdout.splitlines()[-1].split())
        least.append(after - before)
        yield f"{before:.0f} switches a call with 2 threads, {after:.0f} after one with {many}; {alive:.0f} threads"
        if min(least) < 20:  # a busy machine may add some, 1,000 threads that are woken add 1,000
            return
    raise Failed(f"{min(least):.0f} more switches a call with 2 threads, after one with {many}")


def kills(seconds: float) -> Progress:
    """Training runs killed at any moment: what is left is whole, the next run goes on, and ends in the same bits."""
    end, order, count, resumed = time.monotonic() + seconds, random.Random(0), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
        settings = ["--hidden", "32", "--embedding", "8", "--batch", "4", "--unroll", "16", "--steps", "400"]
        settings += ["--validate-every", "20", "--validation-items", "256", "--checkpoint-every", "0"]
        train = ["train", "text", "a.txt", *settings, "--output"]
        whole = retrograd(folder, *train, "whole")
        if whole.returncode:
            raise Failed(f"an undisturbed run ended with {whole.returncode}: {last_line(whole.stderr)}")
        model = (folder / "whole" / "model.safetensors").read_bytes()
        while count < 3 or time.monotonic() < end:
            run = folder / "run"
            shutil.rmtree(run, ignore_errors=True)
            for kill in (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM, None):
                again = (run / "checkpoint.safetensors").exists()
                resumed += again
                arguments = ["train", "text", "--resume", "run"] if again else [*train, "run", "--overwrite"]
                code, errors = disturbed(folder, run, arguments, kill, order)
                if code not in ((0,) if kill is None else (0, -kill, 128 + kill)) or "Traceback" in errors:
                    raise Failed(f"after {kill!r} a run ended with {code}: {last_line(errors)}")
                count += 1
                yield f"{count} runs, {resumed} of them resumed"
                if code == 0:
                    break
            if (run / "model.safetensors").read_bytes() != model:
                raise Failed("a run that was killed and resumed has another model than one that was not")
            left = [path.name for path in run.iterdir() if path.name.endswith(".part")]
            if left:
                raise Failed(f"{left} are left of killed runs")


def disturbed(
    folder: Path, run: Path, arguments: list[str], kill: signal.Signals | None, order: random.Random
) -> tuple[int, str]:
    """Run until files have changed some times, send the signal, and wait for the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "retrograd", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    if kill is not None:
        changes, seen = order.randrange(1, 60), None
        while changes and process.poll() is None:
            now = times(run)
            changes -= now != seen
            seen = now
        process.send_signal(kill)
    return process.wait(HANG), process.communicate()[1]


def times(folder: Path) -> list[tuple[str, int]]:
    """When the files were written, as far as they are there."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.name, path.stat().st_mtime_ns))
    return found


PARTS: dict[str, tuple[Callable[[float], Progress], float]] = {  # and their shares of the time
    "threads": (threads, 0.4),
    "indices": (indices, 0.1),
    "forks": (forks, 0.15),
    "exits": (exits, 0.1),
    "memory": (memory, 0.1),
    "teams": (teams, 0.05),
    "kills": (kills, 0.1),
}


# ---- processes -------------------------------------------------------------------------------------------------------


def script(text: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", text])


def retrograd(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "retrograd", *arguments], cwd=folder)


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False, **options)
    except subprocess.TimeoutExpired:
        raise Failed(f"it hangs: {' '.join(command)[:200]}") from None


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    part: str
    held: bool
    seconds: float
    note: str


def one_part(name: str, seconds: float) -> Row:
    """In a process of its own, which a crash may end."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--part", name, "--seconds", str(seconds)]
    note = ""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True) as process,
    ):
        assert process.stdout is not None
        watchdog = threading.Timer(seconds + 2 * HANG, lambda: os.killpg(process.pid, signal.SIGKILL))
        watchdog.start()
        for line in process.stdout:
            note = line.strip()
            if sys.stdout.isatty():
                print(f"\r\x1b[K{name:10} {time.monotonic() - start:5.0f} s  {note}", end="", flush=True)
        code = process.wait()
        watchdog.cancel()
        if sys.stdout.isatty():
            print("\r\x1b[K", end="")
        if code:
            errors.seek(0)
            reason = last_line(errors.read())
            note = reason if code == 1 else f"the process ended with {code}: {reason}"
    row = Row(name, code == 0, time.monotonic() - start, note)
    print(f"{row.part:10} {'held' if row.held else 'FAILED':8} {row.seconds:5.0f} s  {row.note}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Stress retrograd.")
    parser.add_argument("--seconds", type=float, default=150.0, help="in all (default: %(default)s; threads get 40 %%)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run (default: all)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        try:
            for note in PARTS[options.part][0](options.seconds):
                print(note, flush=True)
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    chosen = options.only or list(PARTS)
    whole = sum(PARTS[name][1] for name in chosen)
    rows = [one_part(name, options.seconds * PARTS[name][1] / whole) for name in chosen]
    failed = [row.part for row in rows if not row.held]
    print(
        f"{len(rows)} parts in {sum(row.seconds for row in rows):.0f} s: "
        + (f"{', '.join(failed)} failed" if failed else "all held")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
