"""Writes the sources of the site: docs/, the changelog, the examples, plots and the pages of the reference.

    python docs/site/stage.py build/docs/pages

The repository's pages refer to files outside docs/, which a site does not have at the same places; so each link is
resolved as in the repository and then pointed at the file's page. A link to a file without one is an error.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
import sys
from pathlib import Path

import plots
import reference

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
OPTION = re.compile(r"`--[a-z-]+( [-\w]+)?`")
PERCENT = re.compile(r"(?<=\d) (?=%)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def targets() -> dict[str, str]:
    """The place in the site of each file that pages may refer to, by its path in the repository."""
    found = {f"docs/{path.name}": path.name for path in (ROOT / "docs").iterdir() if path.is_file()}
    found |= {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
    found |= {f"docs/plots/{plot.name}.svg": f"plots/{plot.name}.svg" for plot in plots.PLOTS}  # drawn below
    found |= {"README.md": "index.md", "examples": "examples/index.md"}
    found |= {f"examples/{path.name}": f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")}
    found |= {f"bench/results/{path.name}": f"results/{path.name}" for path in (ROOT / "bench/results").glob("*.csv")}
    return found


def relinked(text: str, source: str, places: dict[str, str]) -> str:
    """The page with its links pointed at the places of the site, and options and percentages that are not broken.

    `source` is the page's path in the repository.
    """
    here = posixpath.dirname(places[source])

    def place(match: re.Match[str]) -> str:
        path, anchor = re.fullmatch(r"([^#]*)(#.*)?", match[2]).groups("")  # type: ignore[union-attr]
        if path.startswith(("http://", "https://")) or not path:
            return match[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if wanted not in places:
            raise SystemExit(f"{source}: the link to {path} leads to a file that is not on the site")
        return f"{match[1]}{posixpath.relpath(places[wanted], here or '.')}{anchor}{match[3]}"

    parts = FENCE.split(text)  # code has brackets too
    for number in range(0, len(parts), 2):
        parts[number] = PERCENT.sub("\u00a0", OPTION.sub(r"\g<0>{ .option }", LINK.sub(place, parts[number])))
    return "".join(parts)


def example(path: Path) -> str:
    """A program as a page: its docstring, then all of it."""
    code = path.read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(code)) or ""
    return f"# {path.name}\n\n{about.partition(chr(10) * 2)[0]}\n\n```python\n{code}```\n"


def list_of_examples() -> str:
    lines = ["# Examples", "", "Whole programs, which tests run. They are in the folder `examples` of a checkout.", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        about = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        lines.append(f"- [{path.name}]({path.stem}.md): {' '.join(about.split())}")
    return "\n".join([*lines, ""])


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    places = targets()
    for source, place in places.items():
        path, copy = ROOT / source, out / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source == "README.md" or source.startswith("docs/plots/") or path.is_dir():
            continue
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            if source == "docs/performance.md":
                text = plots.with_plots(text, out / "plots")
            copy.write_text(relinked(text, source, places), encoding="utf-8")
        elif path.suffix == ".py":
            copy.write_text(example(path), encoding="utf-8")
        else:
            shutil.copyfile(path, copy)
    (out / "examples" / "index.md").write_text(list_of_examples(), encoding="utf-8")
    (out / "reference").mkdir()
    for room in reference.ROOMS:
        (out / "reference" / f"{room.module.rpartition('.')[2]}.md").write_text(reference.page_of(room))
    shutil.copyfile(Path(__file__).with_name("extra.css"), out / "extra.css")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
