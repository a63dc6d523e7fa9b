"""Apple's BNNS: its names, descriptors, flags, defaults and status codes, over the engine of retrograd.

Functions answer as Apple's do: 0 or -1, a filter or None, a size or SIZE_MAX. Why a call failed goes to the logger
``retrograd.bnns`` and is what :func:`last_error` returns; the first failure of a process warns. ``docs/bnns.md`` shows
their use, ``docs/apple.md`` every reading of Apple's documentation and every difference.
"""

from ._activation_filter import *
from ._constants import *
from ._failure import *
from ._filter import *
from ._lstm import *
from ._normalization import *
from ._optimizer import *
from ._structures import *
from ._swift import *
