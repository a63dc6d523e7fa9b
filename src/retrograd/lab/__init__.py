"""The laboratory: the oracle, problems with tolerances, ``retrograd verify`` and ``retrograd bench``.

Nothing that computes for users is here, and nothing of the product imports it.
"""
