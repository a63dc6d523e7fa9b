"""``retrograd train``, ``sample`` and ``forecast``: models for text and time series, built with :mod:`retrograd.nn`.

`run` has the training loop and writes the run directory; `text` and `series` are the two kinds of task.
"""
