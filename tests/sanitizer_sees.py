"""That the sanitizers of `make sanitize` see what vector code does: a run that finds nothing is only then worth having.

Not a test_*.py: without the sanitizers, what is done here on purpose goes unnoticed or crashes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from retrograd import _core

# Views that claim one element more than their memory has.
SCRIPT = """
import sys
import numpy as np
import retrograd
from numpy.lib.stride_tricks import as_strided
from retrograd import _core

level, dtype, short, *sizes = sys.argv[1:]
sets, size = map(int, sizes)
assert _core.select_isa(level)

def array(name):
    memory = np.ones(sets * size - (name == short), dtype)
    return as_strided(memory, (sets, size))

x, y = array("x"), array("y")
retrograd.layer_norm_forward(x, out=y, num_threads=1)
"""


def report(level: str, dtype: str, short: str, sets: int, size: int) -> str:
    arguments = [sys.executable, "-c", SCRIPT, level, dtype, short, str(sets), str(size)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr


# Whole vectors; a vector and a part of one; a result large enough to be streamed past the cache.
@pytest.mark.parametrize(("sets", "size"), [(1, 64), (1, 31), (1024, 1024)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("level", _core.isa_levels())
def test_one_element_too_many(level: str, dtype: str, sets: int, size: int) -> None:
    assert not report(level, dtype, "", sets, size)
    for short, access in (("x", "READ of size"), ("y", "WRITE of size")):
        text = report(level, dtype, short, sets, size)
        assert "AddressSanitizer" in text
        assert access in text
        assert "src/core/kernels/" in text  # where it happened, in lines of source
