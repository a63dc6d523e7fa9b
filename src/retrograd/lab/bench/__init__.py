"""``retrograd bench``: verify, then time, then say how far from the machine's own limit.

Every row is a training step: forward into given buffers, then all gradients into given buffers, each timed alone.
Rivals take turns in the same process, in rounds whose order rotates, so that the machine's moods hit all alike. Ratios
are medians over the rounds of the ratio of that round's medians. The bound is measured in the same rounds:

- of a norm, a streaming pass over the fewest possible bytes (forward: x read, y written; backward: x, dy, and y under
  an activation, read, dx written) of arrays of the same size, with ordinary and with non-temporal stores, whichever is
  faster;
- of an LSTM, its matrix products at the speed of NumPy's own (BLAS) of two 1024 x 1024 matrices, by as many threads.

The rival of a front end's row (``bnns_*``, ``mps_*``) are the array functions, which do the same work, to the bit.
``added`` is what a call of the front end takes longer: the median over the rounds of the difference of that round's
medians.

A row of the suite ``train`` is a whole training step of a model, optimizer included (see :mod:`.train`).
"""

from .overhead import overhead_calls
from .rows import (
    CSV_COLUMNS,
    SUITES,
    BenchOptions,
    BenchResult,
    BenchRow,
    CsvFile,
    bench_names,
    bench_rows,
    torch_takes_part,
)
from .timing import cpu_model, torch_version

__all__ = [
    "CSV_COLUMNS",
    "SUITES",
    "BenchOptions",
    "BenchResult",
    "BenchRow",
    "CsvFile",
    "bench_names",
    "bench_rows",
    "cpu_model",
    "overhead_calls",
    "torch_takes_part",
    "torch_version",
]
