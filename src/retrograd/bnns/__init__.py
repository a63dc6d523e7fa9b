"""Apple's BNNS: its names, descriptors, flags, defaults and status codes, over retrograd's engine.

Functions return what Apple's return: 0 or -1, a filter or None, a size or SIZE_MAX. The logger
``retrograd.bnns`` and :func:`last_error` give the reason for a failure; the first one in a process also warns.
``docs/bnns.md`` shows how to use them. ``docs/apple.md`` lists how we interpret Apple's documentation, and every
difference.
"""

from ._activation_filter import *
from ._apply import *
from ._arithmetic_filter import *
from ._array_size import *
from ._attention import *
from ._attention_arrays import *
from ._clipping import *
from ._constants import *
from ._contraction import *
from ._convolution import *
from ._copy import *
from ._crop_resize import *
from ._embedding import *
from ._failure import *
from ._filter import *
from ._fully_connected import *
from ._fused import *
from ._gather import *
from ._loss import *
from ._lstm import *
from ._matmul import *
from ._nearest_neighbors import *
from ._normalization import *
from ._optimizer import *
from ._pooling import *
from ._quantization import *
from ._random import *
from ._rearrange import *
from ._reduction import *
from ._resize import *
from ._sample_map import *
from ._structures import *
from ._swift_namespace import *
from ._topk import *
