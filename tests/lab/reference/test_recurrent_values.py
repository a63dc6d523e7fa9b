"""The oracle of recurrent layers against the values printed in the specification of the cells and their options.

The values are those of an implementation that shares nothing with the oracle. Data are made by `fill`, so that an error
of one sign or of the order of the gates changes the printed digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd.lab import reference
from retrograd.lab.reference import GruCell, LstmCell, RnnCell
from support.reference import assert_close

Array = np.ndarray[Any, Any]

PRINTED = 0.5001e-10  # half a unit of the last digit of a number printed to ten decimals


def fill(shape: tuple[int, ...], start: int) -> Array:
    return ((7 * np.arange(np.prod(shape)) + start) % 19 - 9).reshape(shape) / 20


def checksum(a: Any) -> Any:
    a = np.asarray(a).ravel()
    return np.sum(np.arange(1, a.size + 1) * a)


def check(got: dict[str, Any], printed: str) -> None:
    """Compare with lines of a name and its numbers; `chk NAME` is the checksum of an array."""
    lines = [line.split() for line in printed.strip().splitlines()]
    assert lines
    for words in lines:
        summed = words[0] == "chk"
        name = words[int(summed)]
        expected = np.array(words[1 + summed :], dtype=np.float64)
        a = np.atleast_1d(checksum(got[name])) if summed else np.ravel(got[name])
        assert_close(a, expected, atol=PRINTED)


X, H0, C0 = 2 * fill((3, 2, 2), 1), fill((1, 2, 2), 5), fill((1, 2, 2), 13)
DY, DHN, DCN = 2 * fill((3, 2, 2), 4), fill((1, 2, 2), 9), fill((1, 2, 2), 16)
# Rows are samples: m_i, m_f, m_g and m_o; [1, 4, 1, N, H].
MASK = np.array([[[2, 0], [0, 2]], [[2, 2], [2, 0]], [[0, 2], [2, 2]], [[2, 2], [0, 0]]])[None, :, None]
RESET = np.array([[0, 0], [0, 1], [1, 0]], dtype=bool)
KEEP_H = np.array([[[1, 0], [1, 1]], [[0, 1], [1, 0]], [[1, 1], [0, 1]]])
KEEP_C = np.array([[[1, 1], [0, 1]], [[1, 0], [1, 1]], [[0, 1], [1, 1]]])


def test_fill() -> None:
    np.testing.assert_array_equal(X.ravel(), [-0.8, -0.1, 0.6, -0.6, 0.1, 0.8, -0.4, 0.3, -0.9, -0.2, 0.5, -0.7])
    np.testing.assert_array_equal(
        fill((6, 2), 2).ravel(), [-0.35, 0, 0.35, -0.25, 0.1, 0.45, -0.15, 0.2, -0.4, -0.05, 0.3, -0.3]
    )
    np.testing.assert_array_equal(C0.ravel(), [0.2, -0.4, -0.05, 0.3])
    np.testing.assert_array_equal(DCN.ravel(), [0.35, -0.25, 0.1, 0.45])


# --- GRU --------------------------------------------------------------------------------------------------------------


def gru(cell: GruCell | None = None, **options: Any) -> dict[str, Any]:
    if cell is None:
        parts = fill((6, 2), 2), fill((6, 2), 11), fill((6,), 3), fill((6,), 8)
        cell = GruCell(*(a.reshape(3, 2, *a.shape[1:]) for a in parts))
    out = reference.gru_forward(X, [cell], H0, **options)
    back = reference.gru_backward(DY, DHN, X, [cell], H0, **options)
    (d,) = back.cells
    return {
        "y": out.y, "hT": out.hn, "dx": back.dx, "dh0": back.dh0, "dx[2,1]": back.dx[2, 1],
        "dW": d.wx, "dR": d.wh, "db": d.b, "dc": d.bh,
    }  # fmt: skip


GRU: dict[str, tuple[dict[str, Any], str]] = {
    "after": (
        {},
        """
y   0.1918483835 -0.2677661865 -0.2066268291 -0.1450413811  0.1883465610 -0.4544221314 \
0.0583670827 -0.3979763883  0.3822359737 -0.5546824454  0.0624341897 -0.3210634351
dx  0.0631031153  0.0537587537 -0.2300561476 -0.0737498374 -0.0489096792  0.0307242653 \
0.0032996899 -0.0467750710  0.1267140074  0.0079310832 -0.1693327279  0.0310612580
dh0 -0.2734782381 -0.0861472575 0.5960037886 0.0682322923
db  0.0327286340 0.0070075218 -0.0124823601 0.0131775872 0.5228235596 -0.1127501828
dc  0.0327286340 0.0070075218 -0.0124823601 0.0131775872 0.1389890495 -0.0861496940
chk dW -0.8878709590
chk dR -0.7685900933""",
    ),
    "before": (
        {"kind": "before"},
        """
y   0.2478338478 -0.2968058125 -0.0910158353 -0.2001228243  0.3056884295 -0.4904300379 \
0.2007847033 -0.4499279964  0.5101575031 -0.5979814317  0.2372119938 -0.3866687907
dx  0.0463186557  0.0566460644 -0.2036169596 -0.1000605588 -0.0446712103  0.0239881257 \
0.0065285582 -0.0408056860  0.1036295704  0.0086019042 -0.1631146731  0.0293036983
dh0 -0.2760533944 -0.0718969854 0.6104091711 0.1123095189
chk dW -1.2696347968
chk dR -0.8810043269
chk db 1.8856120574
chk dc 1.8856120574""",
    ),
    "after_flip": (
        {"flip": True},
        """
hT 0.3648111049 -0.5682843962 0.1171822941 -0.3289059665
dh0 -0.1706511696 -0.0998407100 0.4247512834 0.0700918136
chk dW 0.8289429194
chk dR -1.2519189874
chk db 2.3886665435
chk dc 0.4969290240""",
    ),
    "before_flip": (
        {"kind": "before", "flip": True},
        """
hT 0.4988569635 -0.6220777831 0.2845983948 -0.3878297980
dh0 -0.1668387855 -0.0854695433 0.3976945356 0.1043486948
chk dW 0.4692487015
chk dR -1.5699977577
chk db 2.4026045486
chk dc 2.4026045486""",
    ),
    "after_mask": (
        {"mask": MASK[:, :3]},
        """
hT 0.3419498129 -0.5501278325 0.0138990479 -0.3301268513
dh0 -0.3523984335 -0.1151557838 0.7091864478 0.1487343532
chk dW -0.2104232173
chk dR -1.3101222018
chk db 1.9522017369
chk dc 0.1676982657""",
    ),
    "before_mask": (
        {"kind": "before", "mask": MASK[:, :3]},
        """
hT 0.4686788160 -0.5859429210 0.1549462731 -0.4118778656
dh0 -0.3533796952 -0.1012225541 0.7427487912 0.2282149984
chk dW -0.6616065374
chk dR -1.8448384162
chk db 2.1194129374
chk dc 2.1194129374""",
    ),
    "after_reset": (
        {"reset": RESET},
        """
hT 0.3196566156 -0.3306328761 0.1330750933 -0.2957245716
dh0 -0.1616651283 -0.1029846937 0.5450484735 -0.0517581581
chk dW -1.4787858224
chk dR 0.4388574169
chk db 1.7844937929
chk dc 0.0436262384""",
    ),
    "after_lengths": (
        {"active": reference.active_from_lengths([3, 2], 3)},
        """
y   0.1918483835 -0.2677661865 -0.2066268291 -0.1450413811  0.1883465610 -0.4544221314 \
0.0583670827 -0.3979763883  0.3822359737 -0.5546824454  0 0
hT 0.3822359737 -0.5546824454 0.0583670827 -0.3979763883
dh0 -0.2734782381 -0.0861472575 0.3950377889 0.0611783158
dx[2,1] 0 0
chk dW -0.4548443458
chk dR -0.8299489686
chk db 0.6101335566
chk dc 0.3591116787""",
    ),
}


@pytest.mark.parametrize("name", GRU)
def test_gru(name: str) -> None:
    options, printed = GRU[name]
    check(gru(**options), printed)


def test_gru_with_the_candidate_bias_outside_the_reset_product() -> None:
    """The form that BNNSGraph prints: kind "after", with c_n added to b_n instead."""
    b, c = fill((3, 2), 3), fill((3, 2), 8)
    b[2] += c[2]
    c[2] = 0
    cell = GruCell(fill((3, 2, 2), 2), fill((3, 2, 2), 11), b, c)
    printed = """
hT 0.5151432546 -0.5992440912 0.2694623815 -0.3885650792
dh0 -0.2733506843 -0.0697868671 0.6146214963 0.0415128865
chk dW -1.1842330840
chk dR -0.3211269596
chk db 1.6933027011"""
    check(gru(cell), printed)


# --- simple RNN -------------------------------------------------------------------------------------------------------


def rnn(wh: Array, activation: str = "tanh") -> dict[str, Any]:
    cell = RnnCell(fill((1, 2, 2), 2), wh, fill((1, 2), 3))
    options: dict[str, Any] = {"activations": [(activation, 0.0, 0.0)]}
    out = reference.rnn_forward(X, [cell], H0, **options)
    back = reference.rnn_backward(DY, DHN, X, [cell], H0, **options)
    (d,) = back.cells
    return {
        "y": out.y, "y[2]": out.y[2], "dx": back.dx, "dx[0]": back.dx[0], "dh0": back.dh0,
        "dW": d.wx, "dR": d.wh, "db": d.b, "du": np.diagonal(d.wh[0]),
    }  # fmt: skip


RNN = {
    "tanh": """
y  0.0274930698 -0.1439922659 -0.5370495670  0.4280444536 -0.3774196125 -0.1468528749 \
-0.0210818285  0.0011663252 -0.0885928777 -0.1855819718 -0.4435031508  0.3828505628
dx 0.1554241828 -0.0279755494 -0.2410409468  0.0323261451 -0.4185670773  0.2399562287 \
0.2677562214 -0.1869028582  0.3604273682 -0.1086254248 -0.2442458758  0.0640069085
dh0 -0.0500020192 -0.1270946638 0.0753340710 0.2258618115
chk dW -4.0124155076
chk dR -0.0293597063
chk db 0.1901349656""",
    "relu": """
y  .0275 0 0 .4575 0 0 .045875 0 .015 0 0 .39311875
dx .175 0 -.1136625 .0811875 0 0 .01925 0 .21 0 -.105 .075
dh0 -.05 -.225 .0487125 -.06495
chk dW 1.85385
chk dR .4267
chk db -2.4045""",
}


@pytest.mark.parametrize("activation", RNN)
def test_rnn(activation: str) -> None:
    check(rnn(fill((1, 2, 2), 11), activation), RNN[activation])


def test_independent_rnn() -> None:
    """An IndRNN is a simple RNN whose recurrent matrix is diagonal."""
    printed = """
y[2] 0.1146062277 -0.2760131649 -0.4294862933 0.3719121651
dx[0] 0.2127376307 0.0112814952 -0.3270190261 0.0221885777
dh0 0.1958843349 -0.0180503924 -0.2536757291 -0.0355017243
chk dW -1.7550609716
chk db 0.1373688099
chk du 0.4312698847"""
    check(rnn(np.diag(2 * fill((2,), 6))[None]), printed)


# --- LSTM -------------------------------------------------------------------------------------------------------------


def lstm(
    data: tuple[Array, ...] = (X, H0, C0, DY, DHN, DCN), *, wh: Array | None = None, **options: Any
) -> dict[str, Any]:
    """Options that are fields of the cell are parameters."""
    x, h0, c0, dy, dhn, dcn = data
    parameters = {name: options.pop(name) for name in LstmCell._fields if name in options}
    usual = LstmCell(2 * fill((4, 2, 2), 2), 2 * fill((4, 2, 2), 11) if wh is None else wh, 2 * fill((4, 2), 3))
    cell = usual._replace(**parameters)
    out = reference.lstm_forward(x, [cell], h0, c0, **options)
    back = reference.lstm_backward(dy, dhn, dcn, x, [cell], h0, c0, **options)
    (d,) = back.cells
    return {
        "y": out.y, "y[T-1]": out.y[-1], "cT": out.cn, "dx": back.dx, "dh0": back.dh0, "dc0": back.dc0,
        "z[:10]": out.gates[0].ravel()[:10],
        "dW": d.wx, "dR": d.wh, "db": d.b, "dp": d.peephole, "dWhr": d.projection,
        "dg0": d.gamma_x, "dg1": d.gamma_h, "dgh": d.gamma_c, "dbh": d.beta_c,
    }  # fmt: skip


LSTM: dict[str, tuple[dict[str, Any], str]] = {
    "plain": (
        {},
        """
y   0.2190306723 -0.3046597259 -0.0403209999  0.0276471939  0.2221174490 -0.4172192594 \
0.0828903555 -0.2189229726  0.1666716756 -0.4444560647  0.0142558390 -0.1647895662
cT  0.4977563147 -0.6593154732 0.0441883097 -0.2972041363
dx -0.0179170567 -0.0514324465 -0.0258786149 -0.0717496499 -0.0648714821  0.0654383178 \
-0.0467194317 -0.0007709289 -0.0395070232 -0.0536949984  0.0518349306 -0.0942006505
dh0 0.0500404664 0.0533147337 0.0009270920 0.0863776896
dc0 0.0556489851 -0.0390556246 0.3066934573 0.0264402067
chk dW 3.9841454852
chk dR -1.2972951034
chk db 2.6987320563""",
    ),
    "coupled": (
        {"coupled": True},
        """
y[T-1] 0.1542225600 -0.5021749619 0.0281196199 -0.1613757782
cT 0.4416073966 -0.7790668027 0.0877505225 -0.2908997665
dh0 0.0451267189 0.0440618681 -0.0215234231 0.1075648429
dc0 0.0298197307 -0.0783908680 0.3652703416 0.0491311728
chk dW 3.5342168214
chk dR -1.4610586623
chk db 2.5975133966""",
    ),
    "clip": (
        {"clip": 0.5},
        """
y[T-1] 0.1248040983 -0.2169161125 0.0113897059 -0.1086141183
cT 0.3434694741 -0.3637153234 0.0301773133 -0.2012909944
dh0 0.0400227405 0.0073471080 0.0149646028 0.1627890305
dc0 -0.0021706664 -0.0273464066 0.2940235722 0.0352836002
chk dW 1.1390296016
chk dR -1.2182021446
chk db 3.3528789015""",
    ),
    "mask": (
        {"mask": MASK},
        """
y[T-1] 0.1142727708 -0.5404185789 0.0099953728 -0.1675538711
dh0 0.0962382180 0.0389765404 -0.0201587379 0.0988258112
dc0 0.0176308520 -0.0428797643 0.2338244157 0.0160907004
chk dW 3.2699384539
chk dR -2.2862580056
chk db 2.2266924528""",
    ),
    "reset": (
        {"reset": RESET},
        """
y[T-1] 0.1461939741 -0.2269498626 0.0232794823 -0.1765773541
dh0 0.0499588431 0.0201783052 0.0604012058 0.0368351000
dc0 -0.0041780062 -0.0545998908 0.2737239908 -0.0378581065
chk dW 3.9253258681
chk dR -0.2681841068
chk db 1.3351699767""",
    ),
    "zoneout_h": (
        {"zoneout_h": KEEP_H},
        """
y[T-1] 0.1893282500 -0.4385536597 0.0828903555 -0.1263855055
cT 0.5828606407 -0.6538782831 0.0907365126 -0.2441050031
dh0 0.0106080226 0.1957263460 -0.0306163050 0.1249859460
dc0 0.0570032530 -0.0627795128 0.3942139787 0.0684289678
chk dW 1.9269568907
chk dR -0.5594754903
chk db 4.1729819754""",
    ),
    "zoneout": (
        {"zoneout_h": KEEP_H, "zoneout_c": KEEP_C},
        """
y[T-1] 0.1893282500 -0.4042659568 0.0971851937 -0.1289050341
cT 0.5291585091 -0.5892779818 0.1065915150 -0.2483005773
dh0 0.0121223862 0.2744164632 -0.0343977469 0.1006361809
dc0 0.1411262804 -0.0717706710 0.4475182179 0.0682240562
chk dW 3.6350235280
chk dR 0.1988249592
chk db 4.0186896406""",
    ),
    "mpsgraph": (
        {"mask": MASK[:, :1], "peephole": 2 * fill((4, 2), 15), "output_reads": "old"},
        """
y[T-1] 0.1444054125 -0.4452828620 0.0011959649 -0.2255457190
cT 0.6268633766 -0.6866450343 0.0037860466 -0.3830431461
z[:10] 0.5000000000 0.4875026035 0.7088901726 0.3186462662 0.6804760061 -0.8564849155 0.4551211076 0.6615031592 \
0.2261814257 0.6364525403
dh0 0.0801558193 0 0 0.1705724572
dc0 0.0589408954 -0.0374913728 0.2045223051 0.1513067867
chk dW 4.7813513334
chk dR -0.0032158499
chk db 3.5149712386
chk dp 0.1926284134""",
    ),
}


@pytest.mark.parametrize("name", LSTM)
def test_lstm(name: str) -> None:
    options, printed = LSTM[name]
    check(lstm(**options), printed)


def test_lstm_with_projection() -> None:
    data = (X, fill((1, 2, 1), 5), C0, 2 * fill((3, 2, 1), 4), fill((1, 2, 1), 9), DCN)
    printed = """
y -0.1815405060 0.0016585548 -0.2254698836 -0.1222269212 -0.2090567378 -0.0575519078
cT 0.7415216610 -0.5392015702 0.1077179420 -0.2230311533
dh0 0.0027811508 -0.0193546200
dc0 0.0745588801 -0.0310012110 0.0480663522 0.0125015222
dx -0.0329633898 0.0230090603 0.0005356916 -0.0169658923 -0.0147285164 -0.0348388945 \
-0.0519854108 0.0013007118 -0.0662794080 0.0140610016 0.1032792104 -0.1371900149
chk dW -2.6641748203
chk dR -0.2152528834
chk db 2.4406843043
chk dWhr -0.0933222948"""
    check(lstm(data, wh=2 * fill((4, 2, 1), 11), projection=2 * fill((1, 2), 6)), printed)


NORMALIZED = {
    "haste": """
y -0.3495105260 0.1878852150 0.3026177464 0.5108183701 -0.2646779025 0.0276176328
cT 0.1462441944 -0.4945828211 -0.0237250612
dx 0.0130754695 -0.1046501869 -0.0481464065 -0.0481540768
dh0 0.3863734860 -0.2967574255 -0.2706180439
dc0 -0.0131698211 0.1284033132 -0.0170961070
chk dW -5.4952381469
chk dR -11.7189095288
chk db 0.2295802994
chk dg0 2.4968788549
chk dg1 0.9874202027
chk dgh -0.2841186927
chk dbh 0.3377951171""",
    "cell": """
y -0.2874573439 0.1654966414 0.3670422410 -0.0397140028 -0.2146216532 0.1322433593
cT -0.0482437297 -0.6778853427 1.4878624097
dx 0.0293597737 -0.2348640829 -0.0086681915 -0.0086768514
dh0 0.4740758087 -0.2560967490 -0.2960858231
dc0 -0.0504734219 0.3720498309 -0.0180081841
chk dW -4.5495741136
chk dR -10.9656700536
chk dg0 2.0110879464
chk db -0.0277851077
chk dg1 1.9599762058
chk dgh 0.6512530011
chk dbh 0.7042600811""",
}


@pytest.mark.parametrize("norm", NORMALIZED)
def test_lstm_with_layer_normalization(norm: str) -> None:
    data = (
        2 * fill((2, 1, 2), 1), fill((1, 1, 3), 5), fill((1, 1, 3), 13),
        2 * fill((2, 1, 3), 4), fill((1, 1, 3), 9), fill((1, 1, 3), 16),
    )  # fmt: skip
    parameters = {
        "wx": 2 * fill((4, 3, 2), 2),
        "wh": 2 * fill((4, 3, 3), 11),
        "b": 2 * fill((4, 3), 3) + (fill((4, 3), 14) if norm == "cell" else 0),  # PyTorch's example has two
        "gamma_x": 1 + fill((4, 3), 7),
        "gamma_h": 1 + fill((4, 3), 12),
        "gamma_c": 1 + fill((3,), 1),
        "beta_c": fill((3,), 10),
    }
    check(lstm(data, norm=norm, **parameters), NORMALIZED[norm])
