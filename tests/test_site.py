"""The site: its scripts refuse what they cannot show, and a strict build loads nothing from other hosts."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import retrograd.bnns
from retrograd.mpsgraph import MPSGraph, MPSGraphConvolution2DOpDescriptor
from retrograd.mpsgraph._left_out import LEFT_OUT
from support.waiting import PATIENCE

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))  # the scripts import one another
plots, reference, stage = map(importlib.import_module, ("plots", "reference", "stage"))

PAGE = """# Performance

<!-- zen4 -->

| float32 | AVX-512, forward | AVX-512, step |
|---|---:|---:|
| layer norm, 4x4 | 0.9x JAX | 1.50x oneDNN |
| LSTM, T=1 | 2x JAX | **0.50x PyTorch** |
| new | 1x JAX |  |

### GRU and RNN

| GRU | 1 thread | PyTorch | JAX | oneDNN |
|---|---:|---:|---:|---:|
| T=1 | 1 µs | 67x | 5.5x | |

### Whole training steps

| steps | nn | PyTorch | torch.compile | JAX |
|---|---:|---:|---:|---:|
| MLP | 1 / 2 µs | 20.5x / 19x | | 1.05x / 2x |

<!-- xeon-conv -->

| rows | AVX-512, step, all |
|---|---:|
| conv | 1.3x |
"""


def test_plots_show_every_row_of_the_tables(tmp_path: Path) -> None:
    page = plots.with_plots(PAGE, tmp_path)
    text = (tmp_path / "layers.svg").read_text(encoding="utf-8")
    assert all(f">{words}<" in text for words in ("layer norm, 4x4", "1.50x oneDNN", "LSTM, T=1", "0.50x PyTorch"))
    assert ">new<" not in text  # it has no ratio
    assert all(plots.SLOWER in text and colour in text for colour in (plots.FASTER, plots.INK))
    assert "20.5x PyTorch" in (tmp_path / "steps.svg").read_text(encoding="utf-8")
    assert "5.5x JAX" in (tmp_path / "gru.svg").read_text(encoding="utf-8")
    lines = page.splitlines()
    for plot in plots.PLOTS:
        (place,) = [number for number, line in enumerate(lines) if f"(plots/{plot.name}.svg)" in line]
        assert lines[place + 2].startswith("| ")  # right above its table
    for plot in plots.PLOTS:  # nothing else has changed
        page = re.sub(rf"[^\n]*\n\n!\[[^\n]*plots/{plot.name}\.svg[^\n]*\n\n", "", page)
    assert page == PAGE


def test_bars_have_the_ratios_of_their_cells() -> None:
    _, table = plots.table_after(PAGE, "<!-- zen4 -->")
    (first,), (second,) = plots.bars_of(table, ("AVX-512, step",), "x")
    assert (first, second) == (
        plots.Bar("layer norm, 4x4", 1.5, "1.50x oneDNN"),
        plots.Bar("LSTM, T=1", 0.5, "0.50x PyTorch"),
    )


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        (PAGE.replace("<!-- zen4 -->", ""), "0 of '<!-- zen4 -->'"),
        (PAGE.replace("AVX-512, step |\n|---|---:|---:|", "step |\n|---|---:|---:|"), "no column 'AVX-512, step'"),
        (PAGE.replace("1.3x", "fast"), "no ratios"),
        (PAGE[: PAGE.index("| rows")], "no table after '<!-- xeon-conv -->'"),
    ],
)
def test_a_table_that_is_not_there_is_refused(page: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=re.escape(complaint)):
        plots.with_plots(page, tmp_path)


def test_links_lead_to_the_places_of_the_site() -> None:
    places = stage.targets()
    text = "[a](../CONTRIBUTING.md#style) [b](nn.md) [c](../examples/nn_images.py) [d](#here) [e](https://x.org)\n"
    code = "```python\nx[0](../not/a/link)  # `--option`\n```\n"
    assert stage.relinked(text + code, "docs/torch.md", places) == (
        "[a](CONTRIBUTING.md#style) [b](nn.md) [c](examples/nn_images.md) [d](#here) [e](https://x.org)\n" + code
    )
    options = stage.relinked("`--time-limit 9m` ends it, as `a --b` does", "docs/nn.md", places)
    assert options == "`--time-limit 9m`{ .option } ends it, as `a --b` does"
    assert stage.relinked("[n](docs/nn.md)", "CHANGELOG.md", places) == "[n](nn.md)"
    with pytest.raises(SystemExit, match=r"docs/nn\.md: the link to \.\./src leads to a file that is not on the site"):
        stage.relinked("[s](../src)", "docs/nn.md", places)


def test_the_reference_has_every_public_function_and_class() -> None:
    for room in reference.ROOMS:
        if room.module in ("retrograd.torch", "retrograd.jax"):
            pytest.importorskip(room.module.partition(".")[2] + ".numpy" if "jax" in room.module else "torch.nn")
        page = reference.page_of(room)
        module = sys.modules[room.module]
        callables = [name for name in module.__all__ if inspect.isclass(getattr(module, name))]
        callables += [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
        assert callables
        for name in callables:
            assert f"::: {room.module}.{name}\n" in page or f"`{name}` is [" in page, name
    assert reference.entry_of("lstm_backward", "retrograd.lstm_forward") == "retrograd.lstm_backward"
    assert reference.entry_of("retrograd.nn.compile", "retrograd.distributed.Shard") == "retrograd.nn.Step"
    assert reference.entry_of("Linear", "retrograd.nn.Sequential") == "retrograd.nn.Linear"
    assert reference.entry_of("no_such_name", "retrograd.lstm_forward") is None
    assert retrograd.__all__


def test_the_reference_has_every_operation_of_mpsgraph() -> None:
    (room,) = [room for room in reference.ROOMS if room.module == "retrograd.mpsgraph"]
    page = reference.page_of(room)
    shown = set(re.findall(r"::: retrograd\.mpsgraph\.MPSGraph\.(\w+)\n", page))
    (others,) = re.findall(r"members: \[(.*)\]", page)
    assert shown | set(others.split(", ")) | set(LEFT_OUT) == {name for name in dir(MPSGraph) if name[0] != "_"}
    assert {"softMax", "topK", "GRU"} <= shown
    assert {"placeholder", "run", "gradients"} <= set(others.split(", "))
    assert not shown & set(LEFT_OUT)


def test_constructors_that_are_not_for_users_are_those_of_public_classes() -> None:
    for path in reference.RESULTS:
        module, _, name = path.rpartition(".")
        if module == "retrograd.torch":
            pytest.importorskip("torch.nn")
        found = importlib.import_module(module)
        assert inspect.isclass(getattr(found, name)), path
        assert name in found.__all__, path


def test_constructors_that_take_fields_are_shown_with_them() -> None:
    pytest.importorskip("griffe")
    docstrings = importlib.import_module("docstrings")
    fields = docstrings.fields_of(retrograd.bnns.BNNSLayerParametersFullyConnected)
    assert [one.name for one in fields] == ["i_desc", "w_desc", "o_desc", "bias", "activation"]
    settings = {one.name: one.default for one in docstrings.fields_of(MPSGraphConvolution2DOpDescriptor)}
    assert settings["strideInX"] == "1"
    assert settings["dataLayout"] == "MPSGraphTensorNamedDataLayout.NCHW"
    assert docstrings.fields_of(dict) is None
    declared = docstrings.setting_of('KernelSetting[float](as_float, FLT_MIN, "Added.")')
    assert declared == ("float", "FLT_MIN", "Added.")
    assert docstrings.setting_of("1") is docstrings.setting_of(None) is None


def test_public_names_have_docstrings() -> None:
    """A first line that ends, makes sense alone and is not the one that NamedTuple writes."""
    for room in reference.ROOMS:
        if room.module in ("retrograd.torch", "retrograd.jax"):
            pytest.importorskip(room.module.partition(".")[2] + ".numpy" if "jax" in room.module else "torch.nn")
        for name in [name for names in reference.names_of(room).values() for name in names]:
            value = getattr(sys.modules[room.module], name)
            if isinstance(value, type) and issubclass(value, int):
                continue  # Apple's enumerations
            text = value.__doc__ or ""
            assert text.strip(), f"{room.module}.{name}"
            assert not text.startswith(f"{name}("), f"{room.module}.{name}"


class Loaded(HTMLParser):
    """What a page loads, links aside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [values[name] or "" for name in ("src", "srcset", "poster", "data") if name in values]
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(values.get("href") or "")


@pytest.mark.long
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere() -> None:
    """As `make docs` builds it: a broken link or anchor, or a page that is not in the navigation, is an error."""
    for package in ("mkdocs", "material", "mkdocstrings", "jax.numpy", "torch.nn"):
        pytest.importorskip(package)
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    for command in (["docs/site/stage.py", "build/docs/pages"], ["-m", "mkdocs", "build", "--quiet", "--strict"]):
        run = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert run.returncode == 0, run.stderr + run.stdout
    site = ROOT / "build" / "docs" / "site"
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert [place for place in Loaded(text).found if re.match(r"(https?:)?//", place)] == [], page
        assert not re.search(r":(func|class|meth):", text), page
    assert (site / "plots" / "layers.svg").exists()
    graphs, models = ((site / "reference" / f"{room}.html").read_text(encoding="utf-8") for room in ("mpsgraph", "nn"))
    words = re.sub(r"<[^>]+>", "", graphs)
    assert "topKWithSourceTensor:axis:k:name:" in words
    assert words.count("argSort(") == 8  # each form in Python and in Swift
    assert 'id="retrograd.mpsgraph.MPSGraph.softMax"' in graphs
    assert re.search(r"Dropout\(rate: float, \*, rng: Rng = None\)", re.sub(r"<[^>]+>", "", models))
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style
