"""The commands: ``retrograd train text | train series | sample | forecast``."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import retrograd as rg

from ..nn.checkpoint import not_a_file, write_whole
from .chart import png, stacked_svg, visible
from .files import MODEL, check_room, remove_parts
from .progress import Progress
from .run import CHECKPOINT, FILES, Run, RunError, quoted, read_checkpoint
from .series import USES, SeriesSettings, SeriesTask, forecast, load_series_model
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
    _add_training(text, TextTask.kind, TextSettings, _text_task)
    series = kinds.add_parser(
        "series",
        help="a forecast of columns of numbers",
        description="Train a forecast on a CSV file of numeric columns, one row for each time: batch norm, LSTM, "
        "linear. It is compared with simple baselines on the last part of the time, which it does not train on.",
    )
    series.add_argument("files", nargs="?", metavar="DATA.csv", help="the table")
    _add_training(series, SeriesTask.kind, SeriesSettings, _series_task)

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
        description="Forecast the rows that follow a CSV file, with a model of retrograd train series, or with the "
        "baseline that it lost to. Writes a CSV file and a picture.",
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
    forecast.add_argument(
        "--use",
        choices=tuple(USES),
        help="which forecast: the model's, or that of a baseline that it was compared with (default: the one with the "
        "smallest error on held-out time)",
    )
    forecast.set_defaults(run=_forecast)


def _add_training(
    parser: argparse.ArgumentParser,
    kind: str,
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
    parser.set_defaults(run=_train, kind=kind, settings=settings, make=make)


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
    settings: type[Settings] = options.settings
    given = {name: getattr(options, name) for name, *_ in settings.options() if hasattr(options, name)}
    files = [options.files] if isinstance(options.files, str) else list(options.files or [])
    _print_anything()
    try:
        with Progress() as progress:
            if options.resume is not None:
                return _resume(options, given, files, progress)
            return _begin(options, settings(**given), files, progress)
    except MemoryError:
        raise RunError("there is not enough memory; smaller sizes (--hidden, --layers, --batch) need less") from None


def _begin(options: argparse.Namespace, settings: Settings, files: list[str], progress: Progress) -> int:
    with contextlib.ExitStack() as held:
        with _new_folder(options, files) as folder:
            held.enter_context(_alone_in(folder))
            _use_threads(settings)
            task = held.enter_context(contextlib.closing(options.make(settings, files, folder)))
            for old in FILES:
                try:
                    (folder / old).unlink(missing_ok=True)
                except OSError as error:
                    raise InputError(f"{folder / old} cannot be replaced: {error.strerror}") from None
            remove_parts(folder, FILES)
        return _run(Run(task, folder, [os.path.abspath(file) for file in files], progress))


def _resume(options: argparse.Namespace, given: dict[str, Any], files: list[str], progress: Progress) -> int:
    folder, kind = Path(options.resume), options.settings
    for setting in given:
        if setting not in kind.CHANGEABLE:
            raise InputError(f"--{setting.replace('_', '-')} cannot change when a run is resumed")
    if options.output is not None or options.overwrite:
        raise InputError("--resume goes on in the folder of the run; --output and --overwrite are for a new one")
    metadata = read_checkpoint(folder, options.kind)
    try:
        settings = kind.from_record({**metadata["settings"], **given})
        check_room(folder / CHECKPOINT, settings.least_weights())
    except InputError as error:
        raise InputError(f"{folder / CHECKPOINT}: {error}") from None
    _use_threads(settings)
    files = files or metadata["files"]  # which may be given again, if they have moved
    with _alone_in(folder), contextlib.closing(options.make(settings, files, folder)) as task:
        run = Run(task, folder, [os.path.abspath(file) for file in files], progress)
        remove_parts(folder, FILES)
        run.resume(metadata)
        return _run(run)


def _use_threads(settings: Settings) -> None:
    if settings.threads is not None:
        rg.set_num_threads(settings.threads)


def _run(run: Run) -> int:
    run.train()
    return 0 if run.signal is None else _INTERRUPTED + run.signal


@contextlib.contextmanager
def _new_folder(options: argparse.Namespace, files: list[str]) -> Iterator[Path]:
    """The folder of a new run; if it cannot begin, a folder that was made for it goes away."""
    if options.output is not None:
        folder = Path(options.output)
        _check_free(folder, files, options.overwrite)
    else:
        folder = _unused(Path("runs") / f"{options.kind}-{Path(files[0]).stem if files else 'stdlib'}")
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


def _check_free(folder: Path, files: list[str], overwrite: bool) -> None:
    """Nothing that is in the folder goes away without a word, and the data never do."""
    there = [name for name in FILES if (folder / name).exists()]
    for name in there:
        if any(os.path.exists(file) and os.path.samefile(folder / name, file) for file in files):
            raise InputError(f"the run would replace its own data, {folder / name}: name another folder")
    if CHECKPOINT in there and not overwrite:
        where = quoted(folder)
        raise InputError(f"{folder} has a run already: --resume {where} goes on with it, --overwrite replaces it")
    if there and not overwrite:
        raise InputError(f"{folder} has a {there[0]} already: --overwrite replaces it")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two runs at once would replace each other's files: the second is refused."""
    if os.name != "posix":
        yield
        return
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise InputError(f"a run is going on in {folder}") from None
    except OSError:
        pass  # some file systems have no locks
    try:
        yield
    finally:
        os.close(lock)


def _print_anything() -> None:
    """What the standard output's encoding lacks is printed as an escape; where there is no output, nowhere."""
    if sys.stdout is None:  # closed, as by >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it stays open to the end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _unused(folder: Path) -> Path:
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


# ---- sample, forecast ------------------------------------------------------------------------------------------------


def _sample(options: argparse.Namespace) -> int:
    _print_anything()
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
    # What a model writes may control a terminal; a file or a pipe gets it as it is.
    terminal = sys.stdout.isatty()
    for piece in itertools.chain([options.prompt], pieces):
        print(visible(piece) if terminal else piece, end="", flush=terminal)
    print()
    return 0


def _forecast(options: argparse.Namespace) -> int:
    _print_anything()
    forecaster = load_series_model(options.model)
    table = read_table(options.data, gaps=options.gaps or forecaster.settings.gaps)
    output = Path(options.output or f"{Path(options.data).stem}-forecast.csv")
    _check_replaceable(output)
    picture = Path(options.plot) if options.plot else output.with_suffix(".svg")
    _check_replaceable(picture)
    if picture.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {picture}: a picture ends in .svg or .png")
    if len({path.resolve() for path in (output, picture, Path(options.data))}) < 3:
        raise InputError(f"the data {options.data}, the output {output} and the plot {picture} must be three files")
    result = forecast(forecaster, table, options.use)
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
    if forecaster.verdict is not None:
        print(forecaster.verdict)
    print(f"{'by':<12} {'the model' if result.by == 'model' else f'the {result.by} baseline'} ({result.why})")
    print(f"{'forecast':<12} {output}")
    print(f"{'picture':<12} {picture}")
    return 0


def _check_replaceable(path: Path) -> None:
    # A file is written by its replacement: a device would be gone.
    if path.exists() and (what := not_a_file(path)):
        raise InputError(f"{path} is {what}, and cannot be written to")


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
