"""Memory traffic of products and norms on a simulated cache: the same on every machine, and the same every time.

Builds cache_misses.cpp and runs it under Valgrind's cachegrind, at the level AVX2, on one thread, with the caches of a
small core: 32 KiB first level, 512 KiB second. retrograd is told the same sizes. Prints, for each row, the bytes that
come from beyond the second level (misses times 64), per floating-point operation of a product and per element of a
norm, and the bytes that come from the second level into the first. The simulator has no prefetching, and counts a
non-temporal store as an ordinary one.

    python bench/cache_misses.py                       all rows: some minutes; needs valgrind, cmake, ninja
    python bench/cache_misses.py --rows '*products*'
    python bench/cache_misses.py > before.txt          then make a change
    python bench/cache_misses.py --before before.txt --markdown
"""

import argparse
import concurrent.futures
import fnmatch
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINE = 64
L1, L2, LAST_LEVEL = 32 << 10, 512 << 10, 32 << 20


def build(folder):
    """Build the program, without the Python extension, and return its path."""
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), "-DRETROGRAD_EXTENSION=OFF"]
    for command in (configure, ["cmake", "--build", str(folder), "--target", "cache_misses"]):
        subprocess.run(command, check=True, stdout=sys.stderr)
    return str(folder / "cache_misses")


def simulate(program, row, repeats):
    """Return the counts of all events, by cachegrind's names, in a run of the program."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out"
        caches = [f"--I1={L1},8,{LINE}", f"--D1={L1},8,{LINE}", f"--LL={L2},8,{LINE}"]
        tool = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", *caches, f"--cachegrind-out-file={out}"]
        run = [program, row, str(repeats), str(L1), str(L2), str(LAST_LEVEL)]
        result = subprocess.run(
            [*tool, *run], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        if result.returncode:
            sys.exit(f"{row}: {result.stderr}")
        lines = out.read_text().splitlines()
    names, counts = (
        next(line for line in lines if line.startswith(word)).split()[1:] for word in ("events:", "summary:")
    )
    return dict(zip(names, map(int, counts), strict=True))


def measure(program, row, unit, work):
    """Return bytes per unit of work: read and written beyond the second level, and into the first level.

    What comes before is subtracted. A norm's first run warms the cache; of a product, which takes the simulator long,
    only the first run is counted: its operands are much larger than the cache.
    """
    first = 0 if unit == "flop" else 1
    before, after = (simulate(program, row, repeats) for repeats in (first, first + 1))
    delta = {name: after[name] - before[name] for name in after}
    return tuple(LINE * count / work for count in (delta["DLmr"], delta["DLmw"], delta["D1mr"] + delta["D1mw"]))


def read(path):
    """The values of each row of an earlier run."""
    found = {}
    for line in path.read_text().splitlines()[1:]:
        *name, _, read_, written, into = line.split()
        found[" ".join(name)] = (read_, written, into)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="only rows that match")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "core", help="build folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="simulations at a time (default: all CPUs)")
    parser.add_argument("--before", type=pathlib.Path, metavar="FILE", help="also show the output of an earlier run")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args()
    program = build(options.build)
    listed = subprocess.run([program, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [line.split("\t") for line in listed.splitlines()]
    rows = [row for row in rows if any(fnmatch.fnmatchcase(row[0], pattern) for pattern in options.rows)]
    if not rows:
        sys.exit(f"no row matches {' '.join(options.rows)}")
    before = {} if options.before is None else read(options.before)
    head = ("row", "unit", "read", "written", "into L1")
    form = "| {} | {} | {} | {} | {} |" if options.markdown else "{:44} {:8} {:>16} {:>16} {:>16}"
    print(form.format(*head))
    if options.markdown:
        print("|---|---|---:|---:|---:|")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(measure, program, name, unit, float(work)) for name, unit, work in rows]
        for (name, unit, _), future in zip(rows, futures, strict=True):
            cells = [f"{value:.3g}" for value in future.result()]
            if name in before:
                cells = [f"{old} to {new}" for old, new in zip(before[name], cells, strict=True)]
            print(form.format(name, unit, *cells), flush=True)


if __name__ == "__main__":
    main()
