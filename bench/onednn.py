"""Times oneDNN, called from C++, alternating with retrograd: rows of `bench conv`, and plain ones of `lstm` and `gru`.

    python -m venv /tmp/onednn && /tmp/onednn/bin/pip install onednn-cpu-gomp onednn-devel-cpu-gomp
    python bench/onednn.py --root /tmp/onednn
    python bench/onednn.py --root /tmp/onednn --rows 'conv_*' --threads 2

Builds onednn.cpp with a C++ compiler against the oneDNN 3 in that folder, which must use OpenMP. Results are compared
before anything is timed. Prints a Markdown table of medians in microseconds; ratios are medians over the rounds, and
above 1 retrograd is faster. oneDNN gets the same arrays [N, C, H, W], and works on them as they are, or converts them
to layouts of its choice and back, whichever is faster. "Blocked" is oneDNN on data that are in those layouts already.
Of a recurrent layer, only the weights and their gradients are converted.
"""

import argparse
import contextlib
import ctypes
import fnmatch
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from retrograd.lab.bench.conv import CONV_CASES, ConvCase
from retrograd.lab.bench.images import Steps
from retrograd.lab.bench.pool import POOL_CASES
from retrograd.lab.bench.recurrent import OurRecurrent, make_bench_data, plain_case
from retrograd.lab.bench.timing import agree, median_ratio, quantiles, take_turns
from retrograd.lab.cases import GRU_BENCH_CASES, LSTM_BENCH_CASES, RNN_BENCH_CASES, RecurrentCase

SOURCE = pathlib.Path(__file__).resolve().with_suffix(".cpp")
PASSES = "forward", "backward", "step"
LAYOUTS = ("plain", "reordered", "blocked")  # in the order of the C++ enumeration
CELLS = ("rnn", "gru", "lstm")  # likewise


def build(root, folder):
    """Build the library in this folder and load it."""
    path = folder / "onednn.so"
    compiler = [os.environ.get("CXX", "c++"), "-O2", "-std=c++17", "-shared", "-fPIC", "-fopenmp", str(SOURCE)]
    where = [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ldnnl"]
    subprocess.run([*compiler, *where, "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    library.error_text.restype = ctypes.c_char_p
    size, layer = ctypes.c_int64, ctypes.c_void_p
    library.open_convolution.argtypes = [ctypes.c_int, *[size] * 6]
    library.open_pooling.argtypes = [ctypes.c_int, ctypes.c_int, *[size] * 6]
    library.open_recurrent.argtypes = [ctypes.c_int, ctypes.c_int, *[size] * 6]
    for opens in (library.open_convolution, library.open_pooling, library.open_recurrent):
        opens.restype = layer
    library.array_of.argtypes, library.array_of.restype = [layer, ctypes.c_char_p], ctypes.POINTER(ctypes.c_float)
    for name in ("close_layer", "load", "forward", "backward", "store"):
        getattr(library, name).argtypes = [layer]
        getattr(library, name).restype = None
    return library


class OneDnn(Steps):
    """A layer by oneDNN."""

    def __init__(self, library, name, layer, stack):
        if not layer:
            raise RuntimeError(f"{name}: {library.error_text().decode()}")
        stack.callback(library.close_layer, layer)
        super().__init__(name, lambda: library.forward(layer), lambda _: library.backward(layer))
        self._library, self._layer = library, layer

    def _array(self, name, shape):
        pointer = self._library.array_of(self._layer, name.encode())
        return np.ctypeslib.as_array(pointer, shape)

    def _load(self, **arrays):
        for name, array in arrays.items():
            self._array(name, array.shape)[...] = array

    def _stored(self):
        self.step()
        self._library.store(self._layer)


class OneDnnImages(OneDnn):
    """A convolution or pooling."""

    layouts = LAYOUTS

    def __init__(self, library, case, data, layout, stack):
        if isinstance(case, ConvCase):
            layer = library.open_convolution(LAYOUTS.index(layout), *case)
        else:
            layer = library.open_pooling(LAYOUTS.index(layout), case.kind == "max", *case[1:])
        super().__init__(library, f"{case.name}, {layout}", layer, stack)
        inputs = {name: array for name, array in data._asdict().items() if name != "dy"}
        self._results = {"y": data.dy.shape, **{f"d{name}": array.shape for name, array in inputs.items()}}
        self._load(**inputs, dy=data.dy)
        library.load(layer)

    def results(self):
        self._stored()
        return [self._array(name, shape) for name, shape in self._results.items()]


class OneDnnRecurrent(OneDnn):
    """A recurrent layer. oneDNN's gates of a GRU are z r n, and its bias of r and z with h is part of that with x."""

    layouts = LAYOUTS[1:]

    def __init__(self, library, case, data, layout, stack):
        sizes = case.steps, case.samples, case.inputs, case.units, case.layers, case.directions
        layer = library.open_recurrent(LAYOUTS.index(layout), CELLS.index(case.kind_name), *sizes)
        super().__init__(library, f"{case.name}, {layout}", layer, stack)
        self._case, self._shapes = case, (data.x.shape, data.dy.shape)
        self._load(x=data.x, dy=data.dy)
        for parts, (wx, wh, b) in zip(data.weights, self._cells(), strict=True):
            wx[...], wh[...] = self._from_ours(parts.wx), self._from_ours(parts.wh)
            b[...] = biases_for_onednn(parts, case.units) if case.gates == 3 else parts.b.reshape(b.shape)
        library.load(layer)

    def _cells(self, of=""):
        """The arrays of wx, wh and b of each cell, or `of` "d" their gradients."""
        case = self._case
        whole = case.layers == 1 or (case.inputs == case.units and case.directions == 1)
        depth, bias_rows = case.layers if whole else 1, 1 if case.gates == 1 else 4
        for cell in range(case.cells):
            layer, direction = divmod(cell, case.directions)
            primitive, place = (0, layer) if whole else (layer, 0)
            heads = {"wx": (case.cell_inputs(cell), case.gates), "wh": (case.units, case.gates), "b": (bias_rows,)}
            yield [
                self._array(f"{of}{name}{primitive}", (depth, case.directions, *head, case.units))[place, direction]
                for name, head in heads.items()
            ]

    def _from_ours(self, matrix):
        """[G H, I] with gates r z n as [I, G, H] with gates z r n."""
        gates = matrix.reshape(self._case.gates, self._case.units, -1)
        return gates[[1, 0, 2] if len(gates) == 3 else range(len(gates))].transpose(2, 0, 1)

    def _to_ours(self, matrix):
        gates = matrix.transpose(1, 2, 0)
        return gates[[1, 0, 2] if len(gates) == 3 else range(len(gates))].reshape(-1, matrix.shape[0])

    def results(self):
        self._stored()
        found = [self._array(name, shape) for name, shape in zip(("y", "dx"), reversed(self._shapes), strict=True)]
        for dwx, dwh, db in self._cells("d"):
            found += [self._to_ours(dwx), self._to_ours(dwh)]
            if self._case.gates == 3:
                z, r, n, n_of_h = db
                found += [np.concatenate((r, z, n)), np.concatenate((r, z, n_of_h))]
            else:
                found.append(db.reshape(-1))
        return found


def biases_for_onednn(parts, units):
    """Rows z, r, n with x, n with h."""
    (r, z, n), (hr, hz, hn) = parts.b.reshape(3, units), parts.bh.reshape(3, units)
    return np.stack((z + hz, r + hr, n, hn))


def contest(library, case, threads, stack):
    """Return the steppers: retrograd's; oneDNN's on the same arrays; oneDNN's on blocked data."""
    library.set_threads(threads)
    if isinstance(case, RecurrentCase):
        data, peers = make_bench_data(case), OneDnnRecurrent
        ours = OurRecurrent(case, data, threads)
    else:
        data, peers = case.make(), OneDnnImages
        ours = case.ours(data, threads)
    expected = [array.copy() for array in ours.results()]
    slots = [[ours], [], []]
    for layout in peers.layouts:
        peer = peers(library, case, data, layout, stack)
        if not agree(expected, peer.results()):
            raise RuntimeError(f"{case.name}, {layout}: oneDNN gives a different result")
        slots[2 if layout == "blocked" else 1].append(peer)
    return slots


def lines(name, threads, times):
    """A line of the table for each pass, from the times of all slots. The fastest of a slot counts in each round."""
    for index, pass_ in enumerate(PASSES):
        rounds = [[min(values) for values in zip(*(t.medians[index] for t in slot), strict=True)] for slot in times]
        medians = [min(quantiles(t.samples[index])[1] for t in slot) for slot in times]
        cells = [name, pass_, str(threads), f"{medians[0] * 1e6:.1f}"]
        for seconds, medians_of_rounds in zip(medians[1:], rounds[1:], strict=True):
            cells += [f"{seconds * 1e6:.1f}", f"{median_ratio(medians_of_rounds, rounds[0]):.2f}x"]
        yield f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, required=True, help="folder with oneDNN's include and lib")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="only rows that match")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--budget", type=float, default=2.0, metavar="SECONDS", help="time per row and thread count")
    options = parser.parse_args()
    recurrent = [
        case
        for case in (*LSTM_BENCH_CASES, *GRU_BENCH_CASES, *RNN_BENCH_CASES)
        if case == plain_case(case) and case.lengths is None
    ]
    rows = (*CONV_CASES, *POOL_CASES, *recurrent)
    cases = [case for case in rows if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in options.rows)]
    if not cases:
        sys.exit(f"no row matches {' '.join(options.rows)}")
    with tempfile.TemporaryDirectory() as folder:
        library = build(options.root.resolve(), pathlib.Path(folder))
    version = library.version()
    head = (
        f"| float32 | pass | threads | retrograd | oneDNN {version // 100}.{version % 100} | ratio | blocked | ratio |"
    )
    print(head, "|---|---|---:|---:|---:|---:|---:|---:|", sep="\n", flush=True)
    for case in cases:
        for threads in options.threads:
            with contextlib.ExitStack() as stack:
                times = take_turns(contest(library, case, threads, stack), options.rounds, options.budget)
            print("\n".join(lines(case.name, threads, times)), flush=True)


if __name__ == "__main__":
    main()
