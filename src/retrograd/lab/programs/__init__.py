"""Public programs that train with PyTorch: each in an environment of its own, plain and with :mod:`retrograd.torch`.

``retrograd bench programs`` checks that the losses agree and that the expected layers are replaced, then times steps.
"""

from .declared import *
from .environments import *
from .running import *
from .table import *
