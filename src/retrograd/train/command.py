"""The commands: ``retrograd train text | train series | sample | forecast``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import retrograd as rg

from ..nn.checkpoint import write_whole
from .chart import png, stacked_svg
from .progress import Progress
from .run import CHECKPOINT, FILES, MODEL, Run, RunError, read_checkpoint
from .series import SeriesSettings, SeriesTask, forecast, load_series_model
from .settings import InputError, Settings
from .table import read_table
from .task import Task
from .text import TextSettings, TextTask, load_text_model, sample

__all__ = ["add_commands"]

_INTERRUPTED = 128  # plus the number of the signal, as shells have it


def add_commands(commands: Any) -> None:
    """Add the commands to the parser of ``retrograd``."""
    train = commands.add_parser(
        "train",
        help="train a model on your own data",
        description="Train a model. A run is a folder: the model, a checkpoint, the history, a report with the curves.",
    )
    kinds = train.add_subparsers(title="what to train on", metavar="KIND", required=True)
    text = kinds.add_parser(
        "text",
        help="a language model of characters or bytes",
        description="Train a language model on text, of characters or of bytes: embedding, LSTM, layer norm, softmax. "
        "Its measure is bits per character on the last part of the text, which it does not train on.",
    )
    text.add_argument("files", nargs="*", metavar="FILE", help="text (default: Python's own standard library)")
    _add_training(text, TextSettings, _text_task)
    series = kinds.add_parser(
        "series",
        help="a forecast of columns of numbers",
        description="Train a forecast on a CSV file of numeric columns, one row for each time: batch norm, LSTM, "
        "linear. It is compared with simple baselines on the last part of the time, which it does not train on.",
    )
    series.add_argument("files", nargs="?", metavar="DATA.csv", help="the table")
    _add_training(series, SeriesSettings, _series_task)

    sample = commands.add_parser(
        "sample",
        help="let a text model write",
        description="Write text with a model of retrograd train text, as it comes.",
    )
    sample.add_argument("model", metavar="MODEL", help=f"the folder of a run, or its {MODEL}")
    sample.add_argument("--length", type=_whole(0), default=500, metavar="N", help="characters (default: 500)")
    sample.add_argument(
        "--temperature", type=_at_least_0, default=0.8, metavar="X", help="0: always the likeliest (default: 0.8)"
    )
    sample.add_argument("--top-k", type=_whole(1), metavar="K", help="choose among the K likeliest (default: all)")
    sample.add_argument("--prompt", default="", metavar="TEXT", help="what it goes on from (default: nothing)")
    sample.add_argument(
        "--seed", type=_whole(0), default=0, metavar="N", help="another seed, another text (default: 0)"
    )
    sample.set_defaults(run=_sample)

    forecast = commands.add_parser(
        "forecast",
        help="continue a time series",
        description="Forecast the rows that follow a CSV file, with a model of retrograd train series. Writes a CSV "
        "file and a picture.",
    )
    forecast.add_argument("model", metavar="MODEL", help=f"the folder of a run, or its {MODEL}")
    forecast.add_argument("data", metavar="DATA.csv", help="a table with the columns that the model was trained on")
    forecast.add_argument(
        "--output", metavar="FILE", help="where the forecast goes (default: DATA-forecast.csv in this folder)"
    )
    forecast.add_argument(
        "--plot", metavar="FILE", help="where the picture goes, .svg or .png (default: beside the output, .svg)"
    )
    forecast.add_argument(
        "--gaps",
        choices=("refuse", "interpolate"),
        help="what to do where numbers are missing (default: as in training)",
    )
    forecast.set_defaults(run=_forecast)


def _add_training(
    parser: argparse.ArgumentParser,
    settings: type[Settings],
    make: Callable[[Settings, list[str], Path], Task],
) -> None:
    where = parser.add_argument_group("the run")
    where.add_argument("--output", metavar="DIR", help="its folder (default: a new one in runs/, named after the data)")
    where.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    where.add_argument(
        "--resume", metavar="DIR", help="go on with the run in this folder, to the same bits as if it had not stopped"
    )
    settings.add_arguments(parser)
    parser.set_defaults(run=_train, settings=settings, make=make)


def _text_task(settings: Settings, files: list[str], folder: Path) -> Task:
    assert isinstance(settings, TextSettings)
    return TextTask(settings, files, scratch=folder)


def _series_task(settings: Settings, files: list[str], folder: Path) -> Task:
    assert isinstance(settings, SeriesSettings)
    if not files:
        raise InputError("DATA.csv is missing: the table to train on")
    return SeriesTask(settings, files[0])


# ---- train -----------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    kind: type[Settings] = options.settings
    given = {name: getattr(options, name) for name, *_ in kind.options() if hasattr(options, name)}
    files = [options.files] if isinstance(options.files, str) else list(options.files or [])
    name = options.make.__name__.split("_")[1]
    with Progress() as progress:
        if options.resume is not None:
            return _resume(options, name, kind, given, files, progress)
        settings = kind.from_given(given)
        with _new_folder(options, name, files) as folder:
            _use_threads(settings)
            task = options.make(settings, files, folder)
        with contextlib.closing(task):
            for old in FILES:
                (folder / old).unlink(missing_ok=True)
            return _run(Run(task, folder, [os.path.abspath(file) for file in files], progress))


def _resume(
    options: argparse.Namespace,
    name: str,
    kind: type[Settings],
    given: dict[str, Any],
    files: list[str],
    progress: Progress,
) -> int:
    folder = Path(options.resume)
    for setting in given:
        if setting not in kind.RESUMABLE:
            raise InputError(f"--{setting.replace('_', '-')} cannot change when a run is resumed")
    if options.output is not None or options.overwrite:
        raise InputError("--resume goes on in the folder of the run; --output and --overwrite are for a new one")
    metadata = read_checkpoint(folder, name)
    try:
        settings = kind.from_record({**metadata["settings"], **given})
    except InputError as error:
        raise InputError(f"{folder / CHECKPOINT}: {error}") from None
    _use_threads(settings)
    files = files or metadata["files"]  # which may be given again, if they have moved
    with contextlib.closing(options.make(settings, files, folder)) as task:
        run = Run(task, folder, [os.path.abspath(file) for file in files], progress)
        run.resume(metadata)
        return _run(run)


def _use_threads(settings: Settings) -> None:
    if settings.threads is not None:
        rg.set_num_threads(settings.threads)


def _run(run: Run) -> int:
    run.train()
    return 0 if run.signal is None else _INTERRUPTED + run.signal


@contextlib.contextmanager
def _new_folder(options: argparse.Namespace, kind: str, files: list[str]) -> Iterator[Path]:
    """The folder of a new run; if it cannot begin, a folder that was made for it goes away."""
    if options.output is not None:
        folder = Path(options.output)
        if (folder / CHECKPOINT).exists() and not options.overwrite:
            raise InputError(f"{folder} has a run already: --resume {folder} goes on with it, --overwrite replaces it")
    else:
        folder = _unused(Path("runs") / f"{kind}-{Path(files[0]).stem if files else 'stdlib'}")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be made: {error.strerror}") from None
    try:
        yield folder
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _unused(folder: Path) -> Path:
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


# ---- sample, forecast ------------------------------------------------------------------------------------------------


def _sample(options: argparse.Namespace) -> int:
    model, alphabet = load_text_model(options.model)
    pieces = sample(
        model,
        alphabet,
        options.length,
        temperature=options.temperature,
        top_k=options.top_k,
        prompt=options.prompt,
        seed=options.seed,
    )
    if options.prompt:
        print(options.prompt, end="")
    for piece in pieces:
        print(piece, end="", flush=sys.stdout.isatty())
    print()
    return 0


def _forecast(options: argparse.Namespace) -> int:
    forecaster = load_series_model(options.model)
    table = read_table(options.data, gaps=options.gaps or forecaster.settings.gaps)
    output = Path(options.output or f"{Path(options.data).stem}-forecast.csv")
    picture = Path(options.plot) if options.plot else output.with_suffix(".svg")
    if picture.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {picture}: a picture ends in .svg or .png")
    if len({path.resolve() for path in (output, picture, Path(options.data))}) < 3:
        raise InputError(f"the data {options.data}, the output {output} and the plot {picture} must be three files")
    result = forecast(forecaster, table)
    charts = [result.chart(target) for target in result.columns]
    try:
        drawn = png(charts) if picture.suffix == ".png" else stacked_svg(charts).encode()
    except ImportError:
        raise InputError(
            f"--plot {picture}: a .png needs matplotlib (pip install matplotlib), a .svg does not"
        ) from None
    for path, content in ((output, result.csv_text().encode()), (picture, drawn)):
        try:
            write_whole(path, content)
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror or error}") from None
    for note in result.notes:
        print(note)
    print(f"{'forecast':<12} {output}")
    print(f"{'picture':<12} {picture}")
    return 0


def _whole(minimum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is not at least {minimum}")
        return value

    return read


def _at_least_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return value
