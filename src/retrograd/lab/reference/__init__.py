"""The oracle: a plain, slow NumPy reference of norms, recurrent layers, attention, linear layers, convolutions,
pooling, losses, optimizer steps, linear recurrences, and the operations of graphs.

It shares no code with the engine, so the two cannot share a bug. It computes in float64 for float32, float16 and
bfloat16 data, and in `numpy.longdouble` for float64 data, so that it is more precise than the engine. (Where long
double is the same as float64, as on Windows and Apple silicon, it is no more precise for float64 data.)
"""

from .activation import *
from .attention import *
from .convolution import *
from .dense import *
from .graph import *
from .graph_layers import *
from .loss import *
from .norm import *
from .optimizer import *
from .pooling import *
from .recurrent import *
from .recurrent_types import *
from .scan import *
