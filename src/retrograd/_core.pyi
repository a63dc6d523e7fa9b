"""
The engine of retrograd. Use the package's functions instead: they check arguments and explain errors.
"""

from collections.abc import Sequence
import enum


def isa() -> str:
    """The selected instruction-set level."""

def isa_levels() -> list[str]:
    """The levels that this machine can run, slowest first."""

def select_isa(name: str) -> bool:
    """
    Select a level for all later calls; False if this machine cannot run it.
    """

def caches() -> tuple[int, int, int, int]:
    """
    The bytes of a core's first and second level of cache and of the last level, and how many CPUs share that.
    """

def override_caches(l1: int, l2: int, last_level: int, last_level_cores: int) -> None:
    """
    Replace them for all later calls, for tests; a size of 0 is a usual one.
    """

def restore_caches() -> None:
    """Undo override_caches."""

def set_num_threads(threads: int) -> None: ...

def num_threads() -> int: ...

def borrow_team(parallel: int, thread_index: int) -> None:
    """
    Run later calls on another library's threads: the addresses of GOMP_parallel and omp_get_thread_num, or 0.
    """

def has_borrowed_team() -> bool: ...

def release_scratch() -> int:
    """
    Free the scratch memory that this thread keeps between calls; returns the number of bytes.
    """

class ResultMemory:
    """
    A buffer of at least `bytes` bytes. When it is deleted, its memory is kept for reuse.
    """

    def __init__(self, bytes: int) -> None: ...

def may_overlap_itself(array: object) -> bool:
    """Whether elements of the array may share memory."""

def may_overlap(results: object, others: object) -> bool:
    """
    Whether the span of a result overlaps the span of any other array in the lists; entries may be None.
    """

def waiting_memory() -> int:
    """The number of bytes kept for later results."""

def release_memory() -> int:
    """Return them to the system; returns how many there were."""

def activations() -> tuple[tuple[str, int, float | None, float | None, str], ...]:
    """
    Every activation: name, code, default alpha and beta, why the output does not determine the slope.
    """

class Reason(enum.Enum):
    """Why a call was refused."""

    type = 0

    dtype = 1

    shape = 2

    layout = 3

    self_overlap = 4

    overlap = 5

    in_place = 6

    missing = 7

    out_of_range = 8

    foreign_cache = 9

    cache_of_another_problem = 10

    stale_cache = 11

    outside = 12

class Refusal:
    """The result of a call that was refused. Nothing was written."""

    @property
    def reason(self) -> Reason: ...

    @property
    def argument(self) -> str: ...

def add_streams(dst: object, sources: Sequence[object], non_temporal: bool, passes: int, threads: int) -> Refusal | None:
    """dst = sum(sources) of contiguous float32 arrays, `passes` times."""

def multiply_adds(steps: int, threads: int) -> float:
    """
    Execute multiply-adds on registers, a few per step; returns how many floating-point operations those were.
    """

def gate_projection(u: object, w: object, bias: object, gates: object, threads: int) -> Refusal | None:
    """
    gates = u w' + bias: an LSTM's gates, of all steps, without the recurrent part.
    """

def gate_input_gradient(dz: object, w: object, du: object, threads: int) -> Refusal | None:
    """du = dz w"""

def gate_weight_gradient(dz: object, u: object, dw: object, threads: int) -> Refusal | None:
    """dw = dz' u"""

def convolve(f64: bool, transposed: bool, kind: int, alpha: float, beta: float, source: object, w: object, b: object | None, out: object, geometry: Sequence[int], accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """A convolution of images, or the gradient of its input."""

def conv_weights(f64: bool, x: object, dy: object, dw: object, geometry: Sequence[int], accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """The gradient of a convolution's weights."""

def channel_sums(f64: bool, images: object, sums: object, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """The sum of every channel."""

def linear_forward(f64: bool, x: object, w: object, b: object | None, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """y = x w' + b"""

def linear_backward(f64: bool, dy: object, x: object, w: object, dx: object | None, dw: object | None, db: object | None, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """dx = dy w, dw = dy' x, db = the sum of dy's rows."""

def embedding_forward(f64: bool, indices: object, table: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """y[p] = table[indices[p]]"""

def embedding_backward(f64: bool, dy: object, indices: object, dtable: object, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """dtable[indices[p]] += dy[p], in the order of p."""

def softmax_cross_entropy(f64: bool, logits: object, labels: object | None, ignored: int, targets: object | None, weights: object | None, weight: float, smoothing: float, reduction: int, scale: float, losses: object | None, gradient: object | None, loss: object | None, overlap_checked: bool, threads: int) -> float | Refusal:
    """The loss and its gradient."""

def cosine_distance(f64: bool, y: object, target: object, weights: object | None, weight: float, reduction: int, scale: float, losses: object | None, gradient: object | None, loss: object | None, overlap_checked: bool, threads: int) -> float | Refusal:
    """1 - the product of rows of unit length, and the gradient."""

def element_losses(f64: bool, kind: int, a: float, b: float, y: object, target: object, weights: object | None, weight: float, reduction: int, scale: float, values: object | None, gradient: object | None, loss: object | None, overlap_checked: bool, threads: int) -> float | Refusal:
    """A loss of every element, and the gradient."""

def activation_forward(kind: int, alpha: float, beta: float, dtype: int, x: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """y = f(x)"""

def activation_backward(kind: int, alpha: float, beta: float, dtype: int, dy: object, slope_from: object, slope_from_input: bool, dx: object, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """dx = dy * f', with the slope computed from x or from y."""

def dropout(f64: bool, x: object, rate: float, seed: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """y = x * mask / (1 - rate)"""

def recurrent_slots(lengths: object, active: object, order: object) -> None:
    """The number of active slots in each step, and the sample in each slot."""

class RecurrentProblem:
    """A recurrent layer of one shape with one set of options."""

    def __init__(self, kind: int, steps: int, samples: int, inputs: int, units: int, projection: int, layers: int, directions: int, dtype: int, activations: Sequence[tuple[int, float, float]], peephole: int, output_reads_old: bool, coupled: bool, flip: bool, clip: float, cell_clip: float, norm: int, eps: float, mask: int, zoneout: bool, dropout: float) -> None: ...

    def cache_bytes(self, rows: int) -> int: ...

    def forward(self, inputs: object, cache: object | None, stamp: int, y: object | None, hn: object | None, cn: object | None, overlap_checked: bool, threads: int) -> Refusal | None: ...

    def backward(self, dy: object | None, dhn: object | None, dcn: object | None, inputs: object, cache: object, stamp: int | None, dx: object | None, dcells: object | None, dh0: object | None, dc0: object | None, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None: ...

    def check_cache(self, inputs: object, cache: object, stamp: int | None) -> Refusal | None: ...

    def show(self, inputs: object, cache: object, stamp: int | None, cell: int, gates: object | None, cells: object | None) -> Refusal | None: ...

def map(f64: bool, steps: Sequence[tuple[int, int, int, int]], operands: list[object], constants: Sequence[float], results: list[object], registers: Sequence[int], overlap_checked: bool, threads: int) -> Refusal | None:
    """
    Compute a chain of elementwise steps over arrays of one shape, in float or double.
    """

def map_integers(steps: Sequence[tuple[int, int, int, int]], operands: list[object], constants: Sequence[int], results: list[object], registers: Sequence[int], overlap_checked: bool, threads: int) -> Refusal | None:
    """
    The same in int64, which wraps around, over arrays of integers and booleans.
    """

def map_operations() -> tuple[tuple[str, int, int], ...]:
    """Every operation of a map: name, code, number of arguments."""

class NormProblem:
    """A normalization of one shape with one set of options."""

    def __init__(self, shape: Sequence[int], roles: str, channels_per_set: int, dtype: int, eps: float, activation: int, alpha: float, beta: float, slope_from_input: bool) -> None: ...

    def forward(self, x: object, gamma: object | None, beta: object | None, y: object | None, keep: object | None, statistics: object, statistics_given: bool, overlap_checked: bool, threads: int) -> Refusal | None: ...

    def backward(self, dy: object, cache: object, sum_dz: object | None, sum_dz_xhat: object | None, count: object | None, dx: object | None, dgamma: object | None, dbeta: object | None, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None: ...

    def forward_at(self, x: int, gamma: int, beta: int, y: int, statistics: object, statistics_given: bool, channels_last: bool, threads: int) -> Refusal | None:
        """
        Forward of dense arrays by their addresses, which the caller has checked; 0: none.
        """

    def backward_at(self, dy: int, x: int, y: int, gamma: int, beta: int, statistics: object, statistics_given: bool, frozen: bool, dx: int, dgamma: int, dbeta: int, channels_last: bool, threads: int) -> Refusal | None:
        """
        Backward of dense arrays by their addresses, which the caller has checked; 0: none.
        """

    def gradient_sums(self, dy: object, cache: object, sum_dz: object, sum_dz_xhat: object, overlap_checked: bool, threads: int) -> Refusal | None: ...

class OptimizerRule:
    """An optimizer's update rule with its hyperparameters."""

    def __init__(self, kind: int, nesterov: bool, scale: float, low: float, high: float, l2: float, l1: float, keep_first: float, keep_second: float, eps: float, eps_inside: float, momentum: float, gain: float, rate: float, decay: float, maximum_norm: float, norm_of_each: bool, known_norm: float, clip_before_scale: bool) -> None: ...

    def step(self, parameters: object, gradients: object, states0: object, states1: object, states2: object, overlap_checked: bool, threads: int) -> Refusal | None:
        """Update the parameters and states in place."""

    def scheduled_step(self, parameters: object, gradients: object, states0: object, states1: object, states2: object, learning_rate: object, count: object, weight_decay: float, epsilon_hat: bool, factors: Sequence[float], overlap_checked: bool, threads: int) -> Refusal | None:
        """The same with a learning rate and a step number in memory."""

    def given_step(self, parameters: object, gradients: object, states0: object, states1: object, states2: object, learning_rate: object, keep_first: object | None, keep_second: object | None, eps: object | None, overlap_checked: bool, threads: int) -> Refusal | None:
        """The same with all hyperparameters that it has in memory."""

def global_norm(arrays: object, overlap_checked: bool, threads: int) -> float | Refusal: ...

def pool_forward(kind: int, f64: bool, x: object, windows: Sequence[int], count_padding: bool, y: object, indices: object | None, overlap_checked: bool, threads: int) -> Refusal | None:
    """
    y = the largest (0), the average (1) or the norm (2) of each window of x [N, C, H, W].
    """

def pool_backward(kind: int, f64: bool, dy: object, x: object | None, y: object | None, windows: Sequence[int], count_padding: bool, dx: object, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """dx of an average (1) or a norm (2), which needs x and y."""

def indexed_planes(kind: int, f64: bool, part: object, indices: object, whole: object, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """
    Along the last axis: whole[indices] += part (0) or = part (1), 0 elsewhere; or part = whole[indices] (2).
    """

class Arena:
    """The memory of a program, as a buffer."""

class Program:
    """Recorded calls, bound to memory that the program knows."""

    def __init__(self, bytes: int) -> None: ...

    @property
    def arena(self) -> Arena: ...

    def add_memory(self, array: object) -> None:
        """Let records use an array's memory."""

    def add_input(self, array: object) -> None: ...

    def add_output(self, array: object) -> None: ...

    def start_recording(self) -> None:
        """
        From here on the calls of this thread become records instead of being run.
        """

    def stop_recording(self) -> None: ...

    def commit(self) -> None:
        """All later records write to variables."""

    def run(self, inputs: tuple[object, ...], outputs: tuple[object, ...], steps: int, stacked: bool, threads: int, times: object | None) -> tuple[str | int, ...] | None:
        """
        Copy the inputs, run the records, copy the outputs. None, or what is wrong.
        """

    @property
    def size(self) -> int:
        """The number of records."""

    @property
    def first_commit(self) -> int: ...

    @property
    def broken(self) -> bool:
        """Whether a failure has left variables half updated."""

def record_call(function: object) -> bool:
    """
    Record a call of function(), whose exception ends the run and is raised by it. False: nothing is recorded.
    """

def batched_product(f64: bool, a: object, b: object, y: object, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """
    y = a b, or y += a b, for every pair of matrices of [batch, rows, depth] and [batch, depth, cols].
    """

def gather(itemsize: int, x: object, indices: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """y[o, j, i] = x[o, indices[j], i]"""

def gather_along(itemsize: int, x: object, indices: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """y[o, j, i] = x[o, indices[o, j, i], i]"""

def scatter_add(f64: bool, dy: object, indices: object, dx: object, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """dx[o, indices[j], i] += dy[o, j, i], in the order of j."""

def scatter_along_add(f64: bool, dy: object, indices: object, dx: object, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """dx[o, indices[o, j, i], i] += dy[o, j, i], in the order of j."""

def scatter_modes() -> tuple[str, ...]:
    """The names of the modes of scatter, in the order of their numbers."""

def scatter(mode: int, along: bool, updates: object, indices: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """
    y[o, indices[j], i] = f(y, updates[o, j, i]), in the order of j; with `along`, indices[o, j, i].
    """

def philox(state: object, words: object, next: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """Words of Philox4x32-10 after a state, and the next state."""

def reductions() -> tuple[tuple[str, int], ...]:
    """Every reduction: name and code."""

def reduce(kind: int, f64: bool, x: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """y = the reduction of x over the axes along which y has extent 1."""

def reduce_bool(all: bool, x: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """Whether any, or all, elements are true."""

def arg_reduce(max: bool, f64: bool, x: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """
    y = the index of the first largest, or smallest, element along the axis along which y has extent 1.
    """

def scan_forward(f64: bool, axis: int, a: object, b: object, h0: object | None, reset: object | None, y: object | None, hn: object | None, overlap_checked: bool, threads: int) -> Refusal | None:
    """y[t] = a[t] * y[t-1] + b[t] along an axis; hn is the last."""

def scan_backward(f64: bool, axis: int, dy: object | None, dhn: object | None, a: object, reset: object | None, y: object, h0: object | None, da: object | None, da_sums: object | None, db: object | None, dh0: object | None, accumulate: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """Gradients of scan_forward. da_sums, float64: the sums of da over time."""

def softmax(log: bool, f64: bool, x: object, y: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """y = softmax(x), or its logarithm, of every row."""

def softmax_backward(log: bool, f64: bool, dy: object, y: object, dx: object, overlap_checked: bool, threads: int) -> Refusal | None:
    """dx from dy and y."""

def cumulative_sum(f64: bool, x: object, y: object, exclusive: bool, reverse: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """y = the cumulative sums of x [outer, n, inner] along n."""

def cumulative_extreme(f64: bool, x: object, y: object, indices: object, largest: bool, reverse: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """
    y = the largest or smallest elements so far of x [outer, n, inner] along n, and their indices.
    """

def top_k(f64: bool, x: object, values: object, indices: object, largest: bool, overlap_checked: bool, threads: int) -> Refusal | None:
    """
    The k largest or smallest elements of each row, in order, and their indices.
    """

def xla_handlers() -> dict[str, object]:
    """
    Capsules of the functions that XLA calls, by the name under which jax.ffi registers them.
    """
