"""Named problems, shared by the tests, ``verify`` and ``bench``.

Imports only NumPy. (bfloat16 data also imports ml_dtypes, which adds that dtype to NumPy.)
"""

from .graph import *
from .graph_case import *
from .norm import *
from .recurrent import *
