"""retrograd.mps: keyed archives. What is written can be read; what is damaged, foreign or hostile is refused."""

from __future__ import annotations

import pickle
import plistlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.mps import (
    MPSCNNNeuronType,
    MPSKernelOptions,
    MPSMatrixBatchNormalization,
    MPSMatrixBatchNormalizationGradient,
    MTLCreateSystemDefaultDevice,
    MTLDevice,
    MTLOrigin,
    NSKeyedArchiver,
    NSKeyedUnarchiver,
    NSUIntegerMax,
)

DEVICE = MTLCreateSystemDefaultDevice()
NEURON = ("neuronType", "neuronParameterA", "neuronParameterB", "neuronParameterC")


def forward() -> MPSMatrixBatchNormalization:
    kernel = MPSMatrixBatchNormalization(device=DEVICE)
    kernel.label = "norm ä"
    kernel.options = MPSKernelOptions.verbose
    kernel.epsilon = 0.001
    kernel.computeStatistics = True
    kernel.sourceMatrixOrigin = MTLOrigin(1, 2, 0)
    kernel.resultMatrixOrigin = MTLOrigin(3, 4, 0)
    kernel.batchStart = 2
    kernel.batchSize = 2**63 + 5
    kernel.sourceInputFeatureChannels = 9
    kernel.setNeuronType(MPSCNNNeuronType.power, 0.1, -2.5, 3)
    return kernel


def gradient() -> MPSMatrixBatchNormalizationGradient:
    kernel = MPSMatrixBatchNormalizationGradient(device=DEVICE)
    kernel.epsilon = 0.25
    kernel.primarySourceMatrixOrigin = MTLOrigin(1, 2, 0)
    kernel.secondarySourceMatrixOrigin = MTLOrigin(5, 6, 0)
    kernel.gradientThroughStatistics = False
    kernel.setNeuronType(MPSCNNNeuronType.tanH, 1.2, 0.5)
    return kernel


def members(kernel: Any) -> dict[str, Any]:
    values = {setting.name: getattr(kernel, setting.name) for setting in kernel._settings}
    return values | {name: getattr(kernel, name)() for name in NEURON}


def archive(kernel: Any) -> bytes:
    return NSKeyedArchiver.archivedData(withRootObject=kernel, requiringSecureCoding=True)


MAKERS = [forward, gradient, lambda: MPSMatrixBatchNormalization(device=DEVICE)]


@pytest.mark.parametrize("make", MAKERS)
def test_round_trip_as_the_root_object(make: Callable[[], Any]) -> None:
    kernel = make()
    restored = NSKeyedUnarchiver.unarchivedObject(ofClass=type(kernel), from_=archive(kernel))
    assert type(restored) is type(kernel)
    assert members(restored) == members(kernel)
    assert len(members(kernel)) >= 13
    assert restored.device is DEVICE


@pytest.mark.parametrize("make", MAKERS)
def test_round_trip_with_a_coder_and_a_device(make: Callable[[], Any]) -> None:
    """The kernel's values are the archive's own; the device is not among them."""
    kernel, other = make(), MTLDevice()
    archiver = NSKeyedArchiver(requiringSecureCoding=True)
    kernel.encode(with_=archiver)
    archiver.finishEncoding()
    for device in (other, None):
        restored = type(kernel)(coder=NSKeyedUnarchiver(forReadingFrom=archiver.encodedData), device=device)
        assert members(restored) == members(kernel)
        assert restored.device is (device or DEVICE)


def test_a_restored_kernel_computes_the_same() -> None:
    kernel = MPSMatrixBatchNormalization(device=DEVICE)
    kernel.epsilon = 0.3
    restored = NSKeyedUnarchiver.unarchivedObject(MPSMatrixBatchNormalization, archive(kernel))
    assert restored.epsilon == np.float32(0.3)
    assert restored.batchSize == NSUIntegerMax


def test_the_structure_is_foundation_s() -> None:
    contents = plistlib.loads(archive(forward()))
    assert archive(forward()).startswith(b"bplist00")
    assert set(contents) == {"$archiver", "$version", "$top", "$objects"}
    assert (contents["$archiver"], contents["$version"]) == ("NSKeyedArchiver", 100000)
    objects = contents["$objects"]
    assert objects[0] == "$null"
    root = objects[contents["$top"]["root"].data]
    described = objects[root["$class"].data]
    assert described == {
        "$classname": "MPSMatrixBatchNormalization",
        "$classes": ["MPSMatrixBatchNormalization", "MPSMatrixUnaryKernel", "MPSKernel", "NSObject"],
    }
    assert objects[root["label"].data] == "norm ä"
    assert root["sourceNumberOfFeatureVectors"] == -1  # NSUIntegerMax in a signed integer
    assert root["epsilon"] == np.float32(0.001)


def test_a_label_that_looks_like_nil_is_a_label() -> None:
    kernel = forward()
    for label in ("$null", "", None):
        kernel.label = label
        assert NSKeyedUnarchiver.unarchivedObject(type(kernel), archive(kernel)).label == label


def test_values_by_key() -> None:
    archiver = NSKeyedArchiver()
    for key, value in (("yes", True), ("n", -(2**63)), ("x", 0.5), ("s", "text"), ("nothing", None)):
        archiver.encode(value, forKey=key)
    archiver.encode(forward(), forKey="kernel")
    unarchiver = NSKeyedUnarchiver(forReadingFrom=archiver.encodedData)
    assert unarchiver.decodeBool(forKey="yes") is True
    assert unarchiver.decodeInteger(forKey="n") == -(2**63)
    assert unarchiver.decodeDouble(forKey="x") == unarchiver.decodeFloat(forKey="x") == 0.5
    assert unarchiver.decodeObject(of=str, forKey="s") == "text"
    assert unarchiver.decodeString("nothing") is None
    assert unarchiver.containsValue(forKey="x")
    assert not unarchiver.containsValue(forKey="y")
    assert members(unarchiver.decodeObject(MPSMatrixBatchNormalization, "kernel")) == members(forward())
    unarchiver.finishDecoding()


def test_no_coder_is_not_a_default_kernel() -> None:
    for cls in (MPSMatrixBatchNormalization, MPSMatrixBatchNormalizationGradient):
        with pytest.raises(TypeError, match="coder must be an NSKeyedUnarchiver, not NoneType"):
            cls(coder=None, device=DEVICE)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", MAKERS)
def test_pickling_is_refused(make: Callable[[], Any]) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled; archive it with NSKeyedArchiver"):
            pickle.dumps(make(), protocol)


def test_what_cannot_be_archived_is_refused() -> None:
    archiver = NSKeyedArchiver()
    with pytest.raises(TypeError, match="ndarray cannot be archived"):
        archiver.encode(np.zeros(3), forKey="x")
    with pytest.raises(ValueError, match="more than 64 bits"):
        archiver.encode(2**64, forKey="x")
    with pytest.raises(ValueError, match="forKey"):
        archiver.encode(1, forKey="$class")
    archiver.finishEncoding()
    with pytest.raises(RuntimeError, match="finished"):
        archiver.encode(1, forKey="x")
    with pytest.raises(TypeError, match="is not an archivable class"):
        NSKeyedUnarchiver.unarchivedObject(ofClass=dict, from_=archive(forward()))
    with pytest.raises(TypeError, match="coder must be an NSKeyedUnarchiver"):
        MPSMatrixBatchNormalization(coder=b"", device=DEVICE)  # type: ignore[arg-type]


# ---- damage ----------------------------------------------------------------------------------------------------------


def read(data: bytes) -> Any:
    return NSKeyedUnarchiver.unarchivedObject(MPSMatrixBatchNormalization, data)


def changed(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> bytes:
    """The archive with something done to it: given the whole and the root object."""
    contents = plistlib.loads(archive(forward()))
    change(contents, contents["$objects"][contents["$top"]["root"].data])
    return plistlib.dumps(contents, fmt=plistlib.FMT_BINARY)


UID = plistlib.UID
DAMAGE: list[tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = [
    (lambda whole, root: whole.update({"$archiver": "NSArchiver"}), "not written by NSKeyedArchiver"),
    (lambda whole, root: whole.pop("$archiver"), "not written by NSKeyedArchiver"),
    (lambda whole, root: whole.update({"$version": 99}), "must be 100000"),
    (lambda whole, root: whole.pop("$objects"), "must be a dictionary"),
    (lambda whole, root: whole.update({"$objects": {}}), "must be a dictionary"),
    (lambda whole, root: whole.update({"$top": []}), "must be a dictionary"),
    (lambda whole, root: whole["$top"].pop("root"), "root is missing"),
    (lambda whole, root: whole["$top"].update(root=5), "root is of type int, must be a reference"),
    (lambda whole, root: whole["$top"].update(root=UID(99)), "root refers to object 99, but there are 4"),
    (lambda whole, root: whole["$top"].update(root=UID(0)), "root is '\\$null', must be an object"),
    (lambda whole, root: whole["$top"].update(root=root["$class"]), "must be a reference"),
    (lambda whole, root: root.pop("$class"), "\\$class is None, must be a reference"),
    (lambda whole, root: root.update({"$class": whole["$top"]["root"]}), "an object of None"),
    (lambda whole, root: whole["$objects"][root["$class"].data].update({"$classname": "NSTask"}), "of 'NSTask', must"),
    (lambda whole, root: whole["$objects"][root["$class"].data].pop("$classname"), "an object of None"),
    (lambda whole, root: root.pop("epsilon"), "epsilon is missing"),
    (lambda whole, root: root.pop("sourceMatrixOrigin.y"), "sourceMatrixOrigin.y is missing"),
    (lambda whole, root: root.pop("neuronType"), "neuronType is missing"),
    (lambda whole, root: root.update(epsilon="big"), "epsilon is 'big', must be a real number"),
    (lambda whole, root: root.update(epsilon=3), "must be a real number"),
    (lambda whole, root: root.update(batchStart=2.0), "batchStart is 2.0, must be an integer"),
    (lambda whole, root: root.update(batchStart=True), "batchStart is True, must be an integer"),
    (lambda whole, root: root.update(batchStart=2**63), "must be an integer of 64 bits"),
    (lambda whole, root: root.update(computeStatistics=1), "must be a bool"),
    (lambda whole, root: root.update(label="direct"), "label is 'direct', must be a reference"),
    (lambda whole, root: root.update(label=whole["$top"]["root"]), "label is of type dict, must be a string"),
    (lambda whole, root: root.update(label=UID(2**40)), "label refers to object 1099511627776"),
    (lambda whole, root: root.update(neuronType=10), "pReLU"),
    (lambda whole, root: root.update(neuronType=77), "not an MPSCNNNeuronType"),
    (lambda whole, root: root.update(neuronParameterA=b"x" * 100), "must be a real number"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_damaged_archives_are_refused_with_a_reason(
    change: Callable[[dict[str, Any], dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(changed(change))


def test_another_class_than_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="of 'MPSMatrixBatchNormalizationGradient', must be of MPSMatrixBatchNorm"):
        read(archive(gradient()))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"bplist00",
        b"bplist00" + b"\xff" * 40,
        b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93.",  # a pickle
        plistlib.dumps({"$archiver": "NSKeyedArchiver"}, fmt=plistlib.FMT_XML),
        plistlib.dumps([1, 2, 3], fmt=plistlib.FMT_BINARY),
        # trailers that claim 2**62 objects, and offsets beyond the end
        b"bplist00" + bytes(6) + bytes([8, 8]) + (2**62).to_bytes(8, "big") + bytes(8) + (8).to_bytes(8, "big"),
        b"bplist00" + bytes(6) + bytes([1, 1]) + (1).to_bytes(8, "big") + bytes(8) + (2**62).to_bytes(8, "big"),
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="archive: "):
        read(data)


def test_an_array_nested_in_itself_is_refused() -> None:
    """Objects 0 to 5000, each an array of the next: deeper than a parser can follow."""
    count = 5000
    body, offsets = bytearray(b"bplist00"), []
    for k in range(count):
        offsets.append(len(body))
        body += b"\xa1" + (k + 1).to_bytes(2, "big")
    offsets.append(len(body))
    body += b"\xa1" + (0).to_bytes(2, "big")  # the last contains the first
    table = len(body)
    body += b"".join(offset.to_bytes(2, "big") for offset in offsets)
    body += bytes(6) + bytes([2, 2]) + (count + 1).to_bytes(8, "big") + bytes(8) + table.to_bytes(8, "big")
    with pytest.raises(ValueError, match="archive: "):
        read(bytes(body))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_bytes_changed_give_a_kernel_or_a_reason(draw: st.DataObject) -> None:
    data = bytearray(archive(forward()))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    data = data[: draw.draw(st.sampled_from([len(data), len(data) // 2]))]
    try:
        kernel = read(bytes(data))
    except ValueError:  # nothing else
        return
    assert type(kernel) is MPSMatrixBatchNormalization
    assert set(members(kernel)) == set(members(forward()))
