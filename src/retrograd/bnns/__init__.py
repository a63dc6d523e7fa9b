"""Apple's BNNS: its names, descriptors, flags, defaults and status codes, over retrograd's engine.

Functions return what Apple's return: 0 or -1, a filter or None, a size or SIZE_MAX. The logger
``retrograd.bnns`` and :func:`last_error` give the reason for a failure; the first one in a process also warns.
``docs/bnns.md`` shows how to use them. ``docs/apple.md`` lists how we interpret Apple's documentation, and every
difference.
"""

from types import ModuleType

from . import (
    _activation_filter,
    _apply,
    _arithmetic_filter,
    _array_size,
    _attention,
    _attention_arrays,
    _clipping,
    _constants,
    _contraction,
    _convolution,
    _copy,
    _crop_resize,
    _embedding,
    _failure,
    _filter,
    _fully_connected,
    _fused,
    _gather,
    _graph,
    _loss,
    _lstm,
    _matmul,
    _nearest_neighbors,
    _normalization,
    _optimizer,
    _pooling,
    _quantization,
    _random,
    _rearrange,
    _reduction,
    _resize,
    _sample_map,
    _structures,
    _topk,
)

__all__ = ["BNNS", "SIZE_MAX", "Address", "FusableLayerParameters", "last_error", "seed_dropout"]
__all__ += ["BNNSGraph"]  # Swift's, as BNNS is: imported when it is first used
__all__ += [_name for _name in vars(_graph) if _name.startswith("bnns_")]

# What begins with BNNS is Apple's, and public in whichever module it is.
for _module in [_value for _value in globals().values() if isinstance(_value, ModuleType)]:
    for _name, _value in vars(_module).items():
        if _name in __all__ or (_name.startswith("BNNS") and _name not in globals()):
            globals()[_name] = _value
__all__ += [_name for _name in globals() if _name.startswith("BNNS") and _name not in __all__]


def __getattr__(name: str) -> object:
    """Import the Swift interfaces when they are first used."""
    if name == "BNNSGraph":
        from . import _graph_swift

        return globals().setdefault(name, _graph_swift.BNNSGraph)
    if name not in ("BNNS", "FusableLayerParameters"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _swift_namespace

    return globals().setdefault(name, getattr(_swift_namespace, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
