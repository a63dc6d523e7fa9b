"""The namespace of the Swift interface."""

from __future__ import annotations

import inspect

from . import _swift_functions, _swift_objects, _swift_optimizer  # noqa: F401  # what they declare is in the namespace
from ._swift import NAMESPACE
from ._swift_fused import FusableLayerParameters as FusableLayerParameters


class BNNS:
    """Swift's namespace."""


for _name, _member in NAMESPACE.items():
    setattr(BNNS, _name, staticmethod(_member) if inspect.isfunction(_member) else _member)
