"""LSTM: dropout between layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import retrograd as rg
from retrograd import LstmActivations, LstmWeights
from retrograd.lab import cases, reference
from retrograd.lab.cases import LstmCase
from retrograd.lab.verify import run_lstm
from support.arrays import assert_same_bits
from support.lstm import THREADS, flat, forward, random


def test_dropout_is_the_oracles_mask() -> None:
    """Seen through layers that pass on what they read: g is the input, i and o are 1, f is 0."""
    units, p, seed = 150, 0.4, 0x123456789ABCDEF
    x = random(3, 5, units, dtype=np.float64)
    wx = np.array([0.0, 0.0, 1.0, 0.0])[:, None, None] * np.eye(units)
    b = np.array([1.0, 0.0, 0.0, 1.0])[:, None] * np.ones(units)
    cells = [LstmWeights(wx, np.zeros((4, units, units)), b)] * 3
    y = rg.lstm_forward(x, cells, activations=LstmActivations(*["identity"] * 5), dropout=p, seed=seed).y
    masks = [reference.philox_mask(seed, layer, x.shape, p) for layer in range(2)]
    np.testing.assert_allclose(y, x * masks[0] * masks[1], rtol=1e-15)


def test_dropout_depends_on_the_seed_alone(isa: str) -> None:
    case = LstmCase(6, 7, 5, 35, layers=3, directions=2, dropout=0.5, seed=2**63 + 5)
    data = cases.make_lstm_data(case)
    expected = run_lstm(case, data, 1)
    for threads in THREADS:
        assert_same_bits(run_lstm(case, data, threads).arrays(), expected.arrays())
    for seed in (0, 5, 2**63 + 6):
        assert np.mean(run_lstm(replace(case, seed=seed), data, 1).y == expected.y) < 0.05


def test_dropout_is_off_in_inference_and_without_layers_in_between() -> None:
    case = LstmCase(4, 3, 5, 9, layers=2, dropout=0.5)
    data = cases.make_lstm_data(case)
    plain = replace(case, dropout=0.0)
    assert_same_bits(flat(forward(case, data, training=False)[:3]), flat(forward(plain, data)[:3]))
    assert not np.array_equal(forward(case, data).y, forward(plain, data).y)
    one = replace(case, layers=1)
    data = cases.make_lstm_data(one)
    assert_same_bits(run_lstm(one, data, 1).arrays(), run_lstm(replace(one, dropout=0.0), data, 1).arrays())
