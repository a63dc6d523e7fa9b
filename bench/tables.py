"""Turns measurements into the tables of docs/performance.md.

    python bench/tables.py avx2=peers-avx2.json avx512=peers-avx512.json
    python bench/tables.py --write docs/performance.md zen4=AVX-512:peers.json,AVX2:peers-avx2.json

A .json file is the output of the harness that runs each library in a separate process, with retrograd through peer.py;
a .csv file is written by `retrograd bench --csv`. With --write, the text between `<!-- NAME -->` and `<!-- /NAME -->`
in the page is replaced by the table of the file NAME=FILE; else the tables are printed. A machine has one table: with
NAME=LABEL:FILE,LABEL:FILE the rows of files with one label follow each other, and a row has the passes of every label,
but the other columns of the first one only.

There is one estimator: a time is the median over the rounds, a ratio the median over the rounds of the other library's
time divided by retrograd's. Above 1, retrograd is faster; within 10 % of 1 it is a tie. The "fastest other" of a pass
is the library with the smallest ratio. Passes are shown for the largest number of threads, the last pass also for the
others.
"""

import argparse
import csv
import json
import pathlib
import re
import statistics
import sys

from retrograd.lab.pages import replaced, table

OURS, BOUND = "retrograd", "bound"
BLOCKED = "onednn-8c"  # on data in another layout: not the same problem
PASSES = {"fwd": "forward", "bwd": "backward", "step": "step"}
LIBRARIES = {"torch": "PyTorch", "jax": "JAX", "onednn": "oneDNN", "tf": "TensorFlow", "mlx": "MLX"}
KINDS = {"bn": "batch norm", "mbn": "batch norm", "ln": "layer norm", "in": "instance norm"}
TIE = 0.1


def library(peer, version=""):
    """A peer's name for readers: torch-compile is "PyTorch compile"; oneDNN has its version, as there may be two."""
    first, *rest = peer.split("-")
    number = re.match(r"\d+\.\d+", version) if first == "onednn" else None
    words = [LIBRARIES.get(first, first), *([number.group()] if number else [])]
    return " ".join([*words, *(word for word in rest if word != "omp")])


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
    """The other's time over ours in every round that has both; 0 is a backward that forward's time hides."""
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


def typical(entry, peer, pass_):
    """The median time in milliseconds."""
    return f"{1e3 * statistics.median(r[peer][pass_] for r in entry['rounds'] if peer in r):.3g}"


def plural(threads):
    return f"{threads} thread{'s' * (threads != 1)}"


def percent(share):
    return f"{share:.0%}".replace("%", " %")


def verdict(values):
    """Wins, ties and losses among median ratios, as the table shows them."""
    shown = [round(value, 2) for value in values]
    wins, losses = sum(value > 1 + TIE for value in shown), sum(value < 1 - TIE for value in shown)
    counts = {"win": wins, "tie": len(shown) - wins - losses, "loss": losses}
    plurals = {"win": "wins", "tie": "ties", "loss": "losses"}
    return ", ".join(f"{count} {word if count == 1 else plurals[word]}" for word, count in counts.items())


def peer_columns(document):
    """The conditions with how many rows were won, the titles, the rows, and the titles of passes."""
    versions = {name: peer.get("version", "") for name, peer in document["peers"].items() if peer["ok"]}
    names = {peer: library(peer, version) for peer, version in versions.items()}
    shown = [f"{library(peer)} {version}".strip() for peer, version in versions.items() if peer not in (BOUND, BLOCKED)]
    entries = {
        (entry["workload"], entry["threads"]): entry
        for entry in document["results"]
        if any(OURS in r for r in entry["rounds"])
    }
    most, *fewer = sorted({threads for _, threads in entries}, reverse=True)
    builds = [peer for peer in versions if peer.startswith("onednn") and peer != BLOCKED]
    builds = builds if len(builds) > 1 else []  # two versions of oneDNN have a column each

    def cell(entry, pass_):
        peer, ratio = fastest_other(entry, pass_) if entry else (None, None)
        return "" if peer is None else f"{ratio:.2f}x {names.get(peer, library(peer))}"

    def build_cell(entry, peer):
        values = [] if "wrong" in entry["info"].get(peer, {}) else ratios(entry["rounds"], peer, OURS, "step")
        return f"{statistics.median(values):.2f}x" if values else ""

    rows = []
    for (workload, threads), entry in entries.items():
        if threads != most:
            continue
        peer, _ = fastest_other(entry, "step")
        share = ratios(entry["rounds"], BOUND, OURS, "step")
        rows.append(
            [
                row_name(workload),
                *(cell(entry, pass_) for pass_ in PASSES),
                *(cell(entries.get((workload, other)), "step") for other in fewer),
                *(build_cell(entry, build) for build in builds),
                typical(entry, OURS, "step"),
                "" if peer is None else typical(entry, peer, "step"),
                percent(statistics.median(share)) if share else "",
            ]
        )
    head = [
        f"float32, {plural(most)}",
        *PASSES.values(),
        *(f"step, {plural(threads)}" for threads in fewer),
        *(f"step, {names[build]}" for build in builds),
        *("step, ms", "fastest other, ms", "of bound"),
    ]
    counted = [(PASSES[pass_], pass_, most) for pass_ in PASSES]
    counted += [(f"step, {plural(threads)}", "step", threads) for threads in fewer]
    verdicts = []
    for title, pass_, threads in counted:
        found = [fastest_other(entry, pass_)[1] for (_, n), entry in entries.items() if n == threads]
        known = [ratio for ratio in found if ratio is not None]
        verdicts += [f"{title}: {verdict(known)}"] if known else []
    conditions = f"{document['machine']['cpu']}; {', '.join(shown)}; {document['date']}."
    against = f" Against the fastest other, {'; '.join(verdicts)}." if verdicts else ""
    return conditions + against, head, rows, head[1 : 1 + len(PASSES) + len(fewer)]


def duration(seconds):
    unit, factor = ("µs", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1 else ("s", 1.0)
    return f"{seconds * factor:.3g} {unit}"


def mebibytes(row):
    return f"{int(row['peak_bytes']) / 2**20:.1f}" if row and row["peak_bytes"] else ""


def csv_columns(rows):
    """The conditions, the titles, a row for each case, and the titles of passes. Passes are ratios to PyTorch, or
    shares of the bound; the other columns describe the last pass. Columns without values are left out."""
    ours = {(row["case"], row["pass"], int(row["threads"])): row for row in rows if row["provider"] == OURS}
    peers = {(row["case"], row["pass"], int(row["threads"])): row for row in rows if row["provider"] == "torch"}
    most, *fewer = sorted({threads for _, _, threads in ours}, reverse=True)
    passes = list(dict.fromkeys(pass_ for _, pass_, _ in ours))
    compared = any(row["ratio_vs_torch"] for row in ours.values())

    def relative(row):
        value = row and row["ratio_vs_torch" if compared else "share_of_bound"]
        return "" if not value else f"{float(value):.2f}x" if compared else percent(float(value))

    columns = {
        "time": lambda row: duration(float(row["p50"])),
        "GFLOPS": lambda row: f"{float(row['gflops']):.0f}" if row["gflops"] else "",
        "of bound": lambda row: percent(float(row["share_of_bound"])) if compared and row["share_of_bound"] else "",
        "of peak": lambda row: percent(float(row["share_of_peak"])) if row.get("share_of_peak") else "",
        "tokens/s": lambda row: f"{float(row['tokens_per_second']):.0f}" if row["tokens_per_second"] else "",
        "MiB": mebibytes,
        "PyTorch MiB": lambda row: mebibytes(peers.get((row["case"], row["pass"], most))),
    }
    lasts = {own[-1] for own in ([p for p in passes if (case, p, most) in ours] for case, _, _ in ours) if own}
    last_title = lasts.pop() if len(lasts) == 1 else "last pass"
    table_rows = []
    for case in dict.fromkeys(case for case, _, _ in ours):
        own = [pass_ for pass_ in passes if (case, pass_, most) in ours]
        if own:
            last = ours[case, own[-1], most]
            table_rows.append(
                {
                    "case": case,
                    **{pass_: relative(ours.get((case, pass_, most))) for pass_ in passes},
                    **{f"{last_title}, {plural(n)}": relative(ours.get((case, own[-1], n))) for n in fewer},
                    **{title: text(last) for title, text in columns.items()},
                }
            )
    titles = [title for title in dict.fromkeys(t for row in table_rows for t in row) if title != "case"]
    titles = [title for title in titles if any(row.get(title) for row in table_rows)]
    conditions = dict.fromkeys(
        "; ".join(row[key] for key in ("device", "caches", "isa") if row.get(key)) + f"; retrograd {row['version']}."
        for row in ours.values()
    )
    others = dict.fromkeys(
        f"{library(row['provider'])} {row['version']}" + (f" ({row['isa']})" if row["isa"] else "")
        for row in rows
        if row["provider"] in ("torch", "sgemm")
    )
    meaning = "ratios to PyTorch" if compared else "shares of the bound"
    texts = ["\n".join(conditions) + (f" Others: {', '.join(others)}." if others else "")]
    texts.append(f"Passes are {meaning}; the other columns describe the last pass.")
    head = [f"float32, {plural(most)}", *titles]
    body = [[row["case"], *(row.get(title, "") for title in titles)] for row in table_rows]
    return " ".join(texts), head, body, [title for title in titles if title not in columns]


def columns_of(path):
    with open(path, encoding="utf-8", newline="") as file:
        return peer_columns(json.load(file)) if path.suffix == ".json" else csv_columns(list(csv.DictReader(file)))


def joined(parts):
    """One table of (label, what columns_of returns) for each file, below its conditions."""
    first_label, (_, (corner, *_), _, _) = parts[0]
    conditions, titles, rows = {}, {}, {}
    for label, (text, head, body, passes) in parts:
        conditions[f"{label}: {text}" if label else text] = None
        shown = head[1:] if label == first_label else passes
        named = {title: f"{label}, {title}" if label and title in passes else title for title in shown}
        titles |= dict.fromkeys(named.values())
        for name, *cells in body:
            by_title = dict(zip(head[1:], cells, strict=True))
            rows.setdefault(name, {}).update({named[title]: by_title[title] for title in shown})
    body = [[name, *(cells.get(title, "") for title in titles)] for name, cells in rows.items()]
    return "\n".join(conditions) + "\n\n" + table([corner, *titles], body)


def peer_tables(document):
    return joined([("", peer_columns(document))])


def tables(argument):
    """The table of FILE, or of LABEL:FILE,LABEL:FILE."""
    files = [part.rpartition(":") for part in argument.split(",")]
    return joined([(label, columns_of(pathlib.Path(path))) for label, _, path in files])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="NAME=[LABEL:]FILE")
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="replace the tables in this page")
    options = parser.parse_args(arguments)
    found = {}
    for argument in options.files:
        name, equals, path = argument.partition("=")
        if not equals:
            parser.error(f"{argument}: give NAME=FILE")
        found[name] = tables(path)
    if options.write is None:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in found.items()))
        return
    page = options.write.read_text(encoding="utf-8")
    for name, text in found.items():
        try:
            page = replaced(page, name, text)
        except ValueError as error:
            sys.exit(str(error))
    options.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
