"""The scripts in bench/: tables of measurements, bytes per unit of work from a simulator's counts, and oneDNN."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from retrograd.lab import bench
from retrograd.lab.bench.timing import Times

FOLDER = Path(__file__).parents[3] / "bench"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables, cache_misses, onednn = loaded("tables"), loaded("cache_misses"), loaded("onednn")


def entry(workload: str, threads: int, rounds: list[dict[str, Any]], **info: Any) -> dict[str, Any]:
    times = [
        {peer: dict(zip(("fwd", "bwd", "step"), values, strict=True)) for peer, values in row.items()} for row in rounds
    ]
    return {"workload": workload, "threads": threads, "info": info, "rounds": times}


def document(*entries: dict[str, Any]) -> dict[str, Any]:
    peers: dict[str, dict[str, Any]] = {
        "bound": {"ok": True},
        "torch": {"ok": True, "version": "2.0"},
        "onednn": {"ok": True, "version": "3.13.2 (SYCL runtime)"},
        "onednn-omp": {"ok": True, "version": "3.2.0 (OpenMP runtime)"},
        "tf": {"ok": False},
    }
    return {"machine": {"cpu": "a processor"}, "date": "2026-01-02", "peers": peers, "results": list(entries)}


def test_the_fastest_other_is_found_for_each_pass() -> None:
    """By the median of the ratios of the rounds; wrong results and differences of times do not count."""
    rounds = [
        {
            "bound": (0.5e-3, 1e-3, 1.5e-3),
            "retrograd": (1e-3, 2e-3, 3e-3),
            "torch": (2e-3, 3e-3, 5e-3),
            "jax": (3e-3, 1e-3, 4e-3),
            "onednn-omp": (1e-4, 1e-4, 1e-4),
            "onednn-8c": (1e-4, 1e-4, 1e-4),
        },
        {"retrograd": (2e-3, 4e-3, 6e-3), "torch": (4e-3, 6e-3, 9e-3), "bound": (1e-3, 2e-3, 3e-3)},
        {"retrograd": (1e-3, 2e-3, 3e-3), "torch": (2e-3, 3e-3, 30e-3), "bound": (0.5e-3, 1e-3, 1.5e-3)},
    ]
    info: dict[str, Any] = {"jax": {"bwd_derived": True}, "onednn-omp": {"wrong": {"dx": 1.0}}}
    text = tables.peer_tables(document(entry("ln-64x256", 2, rounds, **info), entry("in-2x3x4x4", 1, rounds[1:])))
    assert text.splitlines()[0] == (
        "a processor; PyTorch 2.0, oneDNN 3.13.2 (SYCL runtime), oneDNN 3.2.0 (OpenMP runtime); 2026-01-02. "
        "Against the fastest other, forward: 1 win, 0 ties, 0 losses; backward: 1 win, 0 ties, 0 losses; "
        "step: 1 win, 0 ties, 0 losses; step, 1 thread: 1 win, 0 ties, 0 losses."
    )
    assert (
        "| float32, 2 threads | forward | backward | step | step, 1 thread | step, oneDNN 3.13 | step, oneDNN 3.2 "
        "| step, ms | fastest other, ms | of bound |"
    ) in text
    # Times are medians, as the ratios are: retrograd's 3, 6 and 3 ms are 3, and the best of them does not count.
    assert "| layer norm, 64x256 | 2.00x PyTorch | 1.50x PyTorch | 1.33x JAX |  |  |  | 3 | 4 | 50 % |" in text
    one = tables.peer_tables(document(entry("in-2x3x4x4", 1, rounds[1:])))
    assert "| float32, 1 thread | forward | backward | step | step, oneDNN 3.13 |" in one
    row = "| instance norm, 2x3x4x4 | 2.00x PyTorch | 1.50x PyTorch | 5.75x PyTorch |  |  | 4.5 | 19.5 | 50 % |"
    assert one.endswith(row)


def test_every_time_and_ratio_is_a_median() -> None:
    """A best time beside a median ratio could say that one library wins both passes and loses the step."""
    times = ((1e-3, 2e-3, 3e-3), (4e-3, 5e-3, 9e-3), (3e-3, 4e-3, 7e-3))
    others = ((2e-3, 2e-3, 4e-3), (2e-3, 2e-3, 4e-3), (5e-3, 5e-3, 10e-3))
    rounds = [{"retrograd": ours, "torch": other} for ours, other in zip(times, others, strict=True)]
    assert tables.peer_tables(document(entry("ln-64x256", 1, rounds))).endswith(
        "| layer norm, 64x256 | 1.67x PyTorch | 1.00x PyTorch | 1.33x PyTorch |  |  | 7 | 4 |  |"
    )


def test_a_tie_is_within_ten_percent() -> None:
    assert tables.verdict([1.101, 1.1049, 1.11, 0.9, 0.899, 0.8949, 2.0]) == "2 wins, 4 ties, 1 loss"


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("bn-32x64x56x56-relu", "batch norm + relu, 32x64x56x56"),
        ("mbn-128x256", "batch norm, 128x256"),
        ("gn8-32x64x56x56", "group norm, 8 groups, 32x64x56x56"),
        ("lstm-T50-B64-I512-H512", "LSTM, T=50 N=64 I=H=512"),
        ("lstm-T100-B32-I40-H256-L2-bi", "LSTM, T=100 N=32 I=40 H=256, 2 layers, bidirectional"),
        ("lstm-T10to100-B32-I128-H128-var", "LSTM, T=10 to 100 N=32 I=H=128, lengths differ"),
    ],
)
def test_rows_have_names_for_readers(workload: str, name: str) -> None:
    assert tables.row_name(workload) == name


def test_tables_replace_those_of_a_page(tmp_path: Path) -> None:
    page, peers, products = (tmp_path / name for name in ("page.md", "peers.json", "products.csv"))
    peers.write_text(json.dumps(document(entry("ln-64x256", 1, [{"retrograd": (1e-3, 2e-3, 3e-3)}]))))
    row = dict.fromkeys(bench.CSV_COLUMNS, "")
    row |= {"case": "a_case", "provider": "retrograd", "pass": "dx", "threads": "2", "p50": "2.5e-05", "gflops": "87.6"}
    row |= {"peak_bytes": "3145728"}
    row |= {"share_of_peak": "0.87", "isa": "avx2", "device": "a processor", "caches": "small", "version": "1.0"}
    with products.open("w", newline="") as file:
        writer = csv.DictWriter(file, bench.CSV_COLUMNS)
        writer.writeheader()
        torch = {"provider": "torch", "version": "2.0", "peak_bytes": "10485760"}
        sgemm = {"provider": "sgemm", "isa": "haswell", "version": "2.4"}
        shares = [{"pass": "forward", "share_of_bound": "0.5"}, {"share_of_bound": "0.99"}]
        shares += [{"threads": "1", "share_of_bound": "0.75"}]
        writer.writerows([*(row | share for share in shares), row | torch, row | sgemm])
    page.write_text("Above.\n<!-- avx2 -->\nold\n<!-- /avx2 -->\nBetween.\n<!-- b --><!-- /b -->\nBelow.\n")
    tables.main(["--write", str(page), f"avx2={peers}", f"b={products}"])
    text = page.read_text()
    assert text.startswith("Above.\n<!-- avx2 -->\n\na processor; ")
    assert "old" not in text
    assert "| layer norm, 64x256 |  |  |  |  |  | 3 |  |  |\n\n<!-- /avx2 -->\nBetween.\n<!-- b -->\n\n" in text
    assert (
        "a processor; small; avx2; retrograd 1.0. Others: PyTorch 2.0 (avx2), sgemm 2.4 (haswell). "
        "Passes are shares of the bound; the other columns describe the last pass.\n\n"
    ) in text
    assert "| float32, 2 threads | forward | dx | dx, 1 thread | time | GFLOPS | of peak | MiB | PyTorch MiB |" in text
    assert text.endswith("| a_case | 50 % | 99 % | 75 % | 25 µs | 88 | 87 % | 3.0 | 10.0 |\n\n<!-- /b -->\nBelow.\n")
    with pytest.raises(SystemExit, match="needs <!-- c --> and <!-- /c -->"):
        tables.main(["--write", str(page), f"c={peers}"])


def test_a_machine_has_one_table(tmp_path: Path) -> None:
    """Files with one label follow each other; another label adds its passes, and no other column."""
    rounds = [{"retrograd": (1e-3, 2e-3, 3e-3), "torch": (2e-3, 3e-3, 6e-3), "bound": (1e-3, 1e-3, 1.5e-3)}]
    paths = [tmp_path / name for name in ("wide.json", "more.json", "narrow.json")]
    for path, workload in zip(paths, ("ln-64x256", "in-2x3x4x4", "ln-64x256"), strict=True):
        path.write_text(json.dumps(document(entry(workload, 1, rounds))))
    wide, more, narrow = paths
    conditions, again, *lines = tables.tables(f"W:{wide},W:{more},N:{narrow}").splitlines()
    assert conditions.startswith("W: a processor; ")
    assert again == conditions.replace("W: ", "N: ")
    assert lines[1].startswith("| float32, 1 thread | W, forward | W, backward | W, step | step, oneDNN 3.13 |")
    assert lines[1].endswith("| step, ms | fastest other, ms | of bound | N, forward | N, backward | N, step |")
    ratios = "2.00x PyTorch | 1.50x PyTorch | 2.00x PyTorch |"
    assert lines[3] == f"| layer norm, 64x256 | {ratios}  |  | 3 | 6 | 50 % | {ratios}"
    assert lines[4] == f"| instance norm, 2x3x4x4 | {ratios}  |  | 3 | 6 | 50 % |  |  |  |"
    assert len(lines) == 5


def test_misses_become_bytes_per_unit_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before a run is subtracted: the set-up of a product, and the first run of a norm."""
    counts = {"DLmr": (100, 120, 160), "DLmw": (10, 12, 14), "D1mr": (1000, 1100, 1300), "D1mw": (50, 50, 70)}
    runs = []

    def simulate(program: str, row: str, repeats: int) -> dict[str, int]:
        runs.append(repeats)
        return {name: values[repeats] for name, values in counts.items()}

    monkeypatch.setattr(cache_misses, "simulate", simulate)
    assert cache_misses.measure("program", "a row", "flop", 64.0) == (20, 2, 100)
    assert cache_misses.measure("program", "a row", "element", 128.0) == (20, 1, 110)
    assert runs == [0, 1, 1, 2]


def test_an_earlier_output_is_read(tmp_path: Path) -> None:
    path = tmp_path / "before.txt"
    path.write_text("row  unit  read  written  into L1\na_norm forward   element   4   4.1   12\n")
    assert cache_misses.read(path) == {"a_norm forward": ("4", "4.1", "12")}


def test_the_fastest_of_onednn_counts() -> None:
    """In each round: the ratio is the median over the rounds."""
    fast, slow = (Times() for _ in range(2))
    for plain, reordered in ((1e-6, 4e-6), (8e-6, 2e-6), (6e-6, 9e-6)):
        fast.add_round([(plain, plain, plain)])
        slow.add_round([(reordered, reordered, reordered)])
    ours, blocked = (Times() for _ in range(2))
    for _ in range(3):
        ours.add_round([(2e-6, 4e-6, 6e-6)])
        blocked.add_round([(1e-6, 8e-6, 9e-6)])
    assert list(onednn.lines("a_row", 2, [[ours], [fast, slow], [blocked]])) == [
        "| a_row | forward | 2 | 2.0 | 4.0 | 1.00x | 1.0 | 0.50x |",
        "| a_row | backward | 2 | 4.0 | 4.0 | 0.50x | 8.0 | 2.00x |",
        "| a_row | step | 2 | 6.0 | 4.0 | 0.33x | 9.0 | 1.50x |",
    ]
