"""``retrograd bench``: verify, then time, then compare with the machine's limit.

Every row is a training step: forward into given buffers, then all gradients into given buffers, each timed separately.
Implementations alternate in the same process, in rounds whose order rotates, so that other load on the machine affects
all alike. A ratio is the median over the rounds of the ratio of the round's medians. The bound is measured in the same
rounds:

- for a norm, a streaming pass over the minimum number of bytes (forward: x read, y written; backward: x, dy, and with
  an activation y, read, dx written) of arrays of the same size, with ordinary or non-temporal stores, whichever is
  faster;
- for an LSTM, GRU or RNN, its matrix products at the speed of NumPy's (BLAS) product of two 1024 x 1024 matrices, with
  as many threads;
- for a convolution, a matrix product of as many operations, likewise; pooling has no bound;
- for a linear recurrence, copies of as many bytes as its arrays have (forward: a and b read, y written; backward: dy, a
  and y read, da and db written), with ordinary or non-temporal stores, whichever is faster;
- for a product, NumPy's product of the same shape, with as many threads; also, the peak of multiply-adds on registers.

A front end's row (``bnns_*``, ``mps_*``) is compared with the array functions, whose results are bitwise the same.
``added`` is the overhead of a front-end call: the median over the rounds of the difference of the round's medians.

A row of the suite ``train`` is a whole training step of a model, optimizer included (see :mod:`.train`). The peak
memory of its rows and of those of ``conv`` is measured in separate processes (see :mod:`.memory`).
"""

from .compare import *
from .levels import *
from .overhead import *
from .page import *
from .rows import *
from .timing import *
