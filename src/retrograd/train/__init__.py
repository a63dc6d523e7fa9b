"""``retrograd train``, ``sample`` and ``forecast``: models for text and for time series, over :mod:`retrograd.nn`.

`run` has the loop and what it leaves in a folder; `text` and `series` are the two kinds of task that it runs.
"""
