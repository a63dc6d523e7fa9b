"""retrograd as a peer of the peer benchmark: `peers.py --plugin bench/peer.py --json peers.json`.

Not part of the package: it is imported by that harness, which checks results against float64 before it times anything.
The harness finds two builds of oneDNN at once, each in an environment of its own: the peer `onednn` is the one of
`ONEDNN_ROOT` (PyPI's `onednn` and `onednn-devel`, 3.13, a SYCL build), `onednn-omp` the one of `ONEDNN_OMP_ROOT`
(`onednn-cpu-gomp` and `onednn-devel-cpu-gomp`, 3.2, with OpenMP). tables.py then has a column for each:

    ONEDNN_ROOT=onednn313 ONEDNN_OMP_ROOT=onednn32 python peers.py --plugin bench/peer.py \\
        --python onednn=onednn313/bin/python --threads 1 2 --rounds 7 --json peers.json
    python bench/tables.py --write docs/performance.md zen4=AVX-512:peers.json
"""

import numpy as np
from peers import EPS, Peer, Runner, Unsupported, register

KINDS = {"bn": "batch_norm", "mbn": "batch_norm", "ln": "layer_norm", "gn": "group_norm", "in": "instance_norm"}


def aligned(array):
    """A copy that starts on a cache line, as the other peers' own arrays do."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class NormRunner(Runner):
    def __init__(self, rg, workload, data, threads):
        self.x, self.dy = aligned(data["x"]), aligned(data["dy"])
        self.gamma, self.beta = data["w"].copy(), data["b"].copy()
        self.y = aligned(self.x)
        self.gradients = rg.NormGradients(aligned(self.x), self.gamma.copy(), self.beta.copy())
        name = KINDS[workload.kind]
        self.forward, self.backward = getattr(rg, f"{name}_forward"), getattr(rg, f"{name}_backward")
        self.options = {"eps": EPS, "activation": workload.act or None, "out": self.y, "num_threads": threads}
        if workload.kind == "gn":
            self.options["num_groups"] = workload.groups
        self.threads = threads

    def fwd(self):
        _, self.cache = self.forward(self.x, self.gamma, self.beta, **self.options)

    def bwd(self):
        self.backward(self.dy, self.cache, out=self.gradients, num_threads=self.threads)

    def results(self):
        g = self.gradients
        return {"y": self.y, "dx": g.dx, "dw": g.dgamma, "db": g.dbeta}


class LstmRunner(Runner):
    def __init__(self, rg, workload, data, threads):
        self.rg, self.cells = rg, [(layer, direction) for layer, direction, _ in workload.params()]
        self.x, self.dy = aligned(data["x"]), aligned(data["dy"])
        self.weights = [
            rg.LstmWeights(*(aligned(data[f"{part}{layer}{direction}"]) for part in ("wi", "wh", "b")))
            for layer, direction in self.cells
        ]
        states = np.zeros((len(self.cells), workload.B, workload.H), np.float32)
        self.outputs = {"y": aligned(self.dy), "hn": aligned(states), "cn": aligned(states)}
        dweights = [rg.LstmWeights(*map(aligned, cell[:3])) for cell in self.weights]
        self.gradients = rg.LstmGradients(dx=aligned(self.x), dweights=dweights)
        lengths = workload.lengths if workload.var else None
        size = rg.lstm_cache_size(
            workload.T,
            workload.B,
            workload.I,
            workload.H,
            num_layers=workload.layers,
            bidirectional=workload.bidir,
            lengths=lengths,
        )
        self.options = {
            "bidirectional": workload.bidir,
            "lengths": lengths,
            "cache": aligned(np.zeros(size, np.uint8)),
            "out": self.outputs,
            "num_threads": threads,
        }
        self.threads = threads

    def fwd(self):
        self.cache = self.rg.lstm_forward(self.x, self.weights, **self.options).cache

    def bwd(self):
        self.rg.lstm_backward(self.dy, self.cache, out=self.gradients, num_threads=self.threads)

    def results(self):
        found = {"y": self.outputs["y"], "dx": self.gradients.dx}
        for (layer, direction), cell in zip(self.cells, self.gradients.dweights, strict=True):
            for name, array in zip(("dwi", "dwh", "db"), cell, strict=False):
                found[f"{name}{layer}{direction}"] = array
        return found


@register
class Retrograd(Peer):
    name = "retrograd"
    doc = "retrograd, cache and output buffers reused"

    def __init__(self, threads):
        super().__init__(threads)
        import retrograd

        self.rg = retrograd

    def version(self):
        return self.rg.__version__

    def prepare(self, workload, data):
        if workload.kind == "lstm":
            return LstmRunner(self.rg, workload, data, self.threads)
        if workload.kind not in KINDS:
            raise Unsupported("normalization and LSTM only")
        return NormRunner(self.rg, workload, data, self.threads)
