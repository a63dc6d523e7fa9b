"""Turns measurements into the tables of docs/performance.md.

    python bench/tables.py avx2=peers-avx2.json avx512=peers-avx512.json
    python bench/tables.py --write docs/performance.md avx2=peers-avx2.json products=products.csv

A .json file is the output of a harness that runs each library in a separate process, with retrograd through peer.py;
a .csv file is written by `retrograd bench --csv`; a .md file, such as the output of cache_misses.py --markdown, is
taken as it is. With --write, the text between `<!-- NAME -->` and `<!-- /NAME -->`
in the page is replaced by the tables of the file NAME=FILE; else the tables are printed.

Ratios are medians over the rounds of the other library's time over retrograd's: above 1, retrograd is faster. The
"fastest other" of a pass is the one with the smallest ratio.
"""

import argparse
import csv
import json
import pathlib
import re
import statistics
import sys

OURS, BOUND = "retrograd", "bound"
BLOCKED = "onednn-8c"  # on data in another layout: not the same problem
PASSES = {"fwd": "forward", "bwd": "backward", "step": "step"}
LIBRARIES = {"torch": "PyTorch", "jax": "JAX", "onednn": "oneDNN", "tf": "TensorFlow", "mlx": "MLX"}
KINDS = {"bn": "batch norm", "mbn": "batch norm", "ln": "layer norm", "in": "instance norm"}


def library(peer):
    """A peer's name for readers: torch-compile is "PyTorch compile"."""
    first, *rest = peer.split("-")
    return " ".join([LIBRARIES.get(first, first), *(word for word in rest if word != "omp")])


def row_name(workload):
    """A workload's name for readers."""
    kind, *parts = workload.split("-")
    if kind != "lstm":
        shape, *activation = parts
        words = KINDS.get(kind) or f"group norm, {kind.removeprefix('gn')} groups"
        return words + "".join(f" + {word}" for word in activation) + f", {shape}"
    sizes = dict(re.findall(r"\b([TBIHL])(\d+(?:to\d+)?)", " ".join(parts)))
    words = [f"T={sizes['T'].replace('to', ' to ')}", f"N={sizes['B']}"]
    words += [f"I=H={sizes['H']}"] if sizes["I"] == sizes["H"] else [f"I={sizes['I']}", f"H={sizes['H']}"]
    more = [f"{sizes['L']} layers"] if "L" in sizes else []
    more += ["bidirectional"] if "bi" in parts else []
    more += ["lengths differ"] if "var" in parts else []
    return ", ".join(["LSTM", " ".join(words), *more])


def ratios(rounds, other, ours, pass_):
    """The other's time over ours in every round that has both; 0 is a backward that could not be told from forward."""
    both = [(r[other].get(pass_), r[ours].get(pass_)) for r in rounds if other in r and ours in r]
    return [theirs / mine for theirs, mine in both if theirs and mine]


def fastest_other(entry, pass_):
    """The fastest correct library but ours in a pass, and the median ratio of its time to ours."""
    found = {}
    for peer in {name for r in entry["rounds"] for name in r} - {OURS, BOUND, BLOCKED}:
        info = entry["info"].get(peer, {})
        derived = pass_ == "bwd" and info.get("bwd_derived")  # the difference of two times
        values = [] if "wrong" in info or derived else ratios(entry["rounds"], peer, OURS, pass_)
        if values:
            found[peer] = statistics.median(values)
    return min(found.items(), key=lambda item: item[1], default=(None, None))


def best(entry, peer, pass_):
    return min(r[peer][pass_] for r in entry["rounds"] if peer in r)


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def plural(threads):
    return f"{threads} thread{'s' * (threads != 1)}"


def peer_tables(document):
    """One table for each number of threads, and the conditions."""
    versions = [
        f"{library(name)} {peer.get('version', '')}".strip()
        for name, peer in document["peers"].items()
        if peer["ok"] and name not in (BOUND, BLOCKED)
    ]
    texts = [f"{document['machine']['cpu']}; {', '.join(versions)}; {document['date']}."]
    for threads in sorted({entry["threads"] for entry in document["results"]}):
        rows = []
        for entry in document["results"]:
            if entry["threads"] != threads or not any(OURS in r for r in entry["rounds"]):
                continue
            cells = [row_name(entry["workload"])]
            for pass_ in PASSES:
                peer, ratio = fastest_other(entry, pass_)
                cells.append("" if peer is None else f"{ratio:.2f}x {library(peer)}")
            peer, _ = fastest_other(entry, "step")
            cells.append(f"{1e3 * best(entry, OURS, 'step'):.3g}")
            cells.append("" if peer is None else f"{1e3 * best(entry, peer, 'step'):.3g}")
            share = ratios(entry["rounds"], BOUND, OURS, "step")
            cells.append(f"{statistics.median(share):.0%}".replace("%", " %") if share else "")
            rows.append(cells)
        head = [f"float32, {plural(threads)}", *PASSES.values(), "step, ms", "fastest other, ms", "of bound"]
        texts.append(table(head, rows))
    return "\n\n".join(texts)


def duration(seconds):
    unit, factor = ("µs", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1 else ("s", 1.0)
    return f"{seconds * factor:.3g} {unit}"


def mebibytes(row):
    return f"{int(row['peak_bytes']) / 2**20:.1f}" if row and row["peak_bytes"] else ""


def csv_tables(rows):
    """One table for each number of threads, of retrograd's rows; columns without values are left out."""
    ours = [row for row in rows if row["provider"] == OURS]
    peers = {(row["case"], row["pass"], row["threads"]): row for row in rows if row["provider"] == "torch"}
    columns = {
        "time": lambda row: duration(float(row["p50"])),
        "GFLOPS": lambda row: f"{float(row['gflops']):.0f}" if row["gflops"] else "",
        "vs PyTorch": lambda row: f"{float(row['ratio_vs_torch']):.2f}x" if row["ratio_vs_torch"] else "",
        "of bound": lambda row: (
            f"{float(row['share_of_bound']):.0%}".replace("%", " %") if row["share_of_bound"] else ""
        ),
        "of peak": lambda row: f"{float(row['share_of_peak']):.0%}".replace("%", " %") if row["share_of_peak"] else "",
        "tokens/s": lambda row: f"{float(row['tokens_per_second']):.0f}" if row["tokens_per_second"] else "",
        "MiB": mebibytes,
        "PyTorch MiB": lambda row: mebibytes(peers.get((row["case"], row["pass"], row["threads"]))),
    }
    columns = {title: cell for title, cell in columns.items() if any(map(cell, ours))}
    conditions = dict.fromkeys(
        f"{row['device']}; {row['caches']}; {row['isa']}; retrograd {row['version']}." for row in ours
    )
    others = dict.fromkeys(
        f"{library(row['provider'])} {row['version']}" + (f" ({row['isa']})" if row["isa"] else "")
        for row in rows
        if row["provider"] in ("torch", "sgemm")
    )
    texts = ["\n".join(conditions) + (f" Others: {', '.join(others)}." if others else "")]
    for threads in sorted({int(row["threads"]) for row in ours}):
        cells = [
            [row["case"], row["pass"], *(cell(row) for cell in columns.values())]
            for row in ours
            if int(row["threads"]) == threads
        ]
        texts.append(table([f"float32, {plural(threads)}", "pass", *columns], cells))
    return "\n\n".join(texts)


def tables(path):
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8").strip()
    with open(path, encoding="utf-8", newline="") as file:
        return peer_tables(json.load(file)) if path.suffix == ".json" else csv_tables(list(csv.DictReader(file)))


def replaced(page, name, text):
    """The page with the text between the marks of this name replaced."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if page.count(start) != 1 or page.count(end) != 1:
        sys.exit(f"the page needs {start} and {end}, once each")
    before, _, rest = page.partition(start)
    return f"{before}{start}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="replace the tables in this page")
    options = parser.parse_args(arguments)
    found = {}
    for argument in options.files:
        name, equals, path = argument.partition("=")
        if not equals:
            parser.error(f"{argument}: give NAME=FILE")
        found[name] = tables(pathlib.Path(path))
    if options.write is None:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in found.items()))
        return
    page = options.write.read_text(encoding="utf-8")
    for name, text in found.items():
        page = replaced(page, name, text)
    options.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
