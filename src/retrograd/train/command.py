"""The commands ``retrograd train text``, ``train series``, ``sample`` and ``forecast``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import retrograd as rg

from .._files import not_a_file, write_whole
from .._printing import report, visible
from ..distributed import Group, RankError, launched_ranks, world
from .chart import png, stacked_svg
from .files import (
    MODEL,
    STANDARD_INPUT,
    check_room,
    remove_parts,
    saved_standard_input,
    standard_input,
    with_standard_input,
)
from .panel_command import FORECAST, forecast_panel, is_panel_model, read_panel, train_panel
from .progress import Progress, SilentProgress
from .run import CHECKPOINT, FILES, Run, RunError, quoted, read_checkpoint
from .series import USES, SeriesSettings, SeriesTask, forecast, load_series_model
from .settings import InputError, Settings, shown
from .table import check_libraries, read_table
from .task import Task
from .text import Alphabet, TextSettings, TextTask, load_text_model, sample

__all__ = ["add_commands"]

_INTERRUPTED = 128  # plus the signal number, as in shells
_SHARDS = 8  # of a batch, with mpirun
_MOST_NAMED = 10  # unknown characters of a prompt


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers of ``retrograd``."""
    train = commands.add_parser(
        "train",
        help="train a model on your own data",
        description="Train a model. Each run has a directory with the model, a checkpoint, the history and a report.",
    )
    kinds = train.add_subparsers(title="kinds of data", metavar="KIND", required=True)
    text = kinds.add_parser(
        "text",
        help="a language model of characters or bytes",
        description="Train a language model of characters or bytes: embedding, LSTM, layer norm, softmax. "
        "The metric is bits per character on the last part of the text, which is not trained on.",
    )
    text.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="text files, or - for standard input (default: the source of Python's standard library)",
    )
    _add_training(text, TextTask.kind, TextSettings, _text_task)
    series = kinds.add_parser(
        "series",
        help="a forecasting model for a table of numbers",
        description="Forecast a table of numbers with one row per time step, or many series of a long table with the "
        "columns unique_id, ds and y (a panel): a CSV, Excel or Parquet file. A network is trained, and competes with "
        "AutoETS, AutoARIMA and other methods; the best of them is used, or a mean of several.",
    )
    series.add_argument(
        "files",
        nargs="?",
        metavar="DATA.csv",
        help="the table, or - for standard input: one row per time step, oldest first",
    )
    _add_training(series, SeriesTask.kind, SeriesSettings, _series_task)

    sample = commands.add_parser(
        "sample",
        help="generate text with a trained model",
        description="Generate text with a model trained by retrograd train text.",
    )
    sample.add_argument("model", metavar="MODEL", help=f"the directory of a run, or its {MODEL}")
    sample.add_argument(
        "--length", type=_whole(0), default=500, metavar="N", help="number of characters to generate (default: 500)"
    )
    sample.add_argument(
        "--temperature",
        type=_at_least_0,
        default=0.8,
        metavar="X",
        help="sampling temperature; 0 always takes the most likely (default: 0.8)",
    )
    sample.add_argument("--top-k", type=_whole(1), metavar="K", help="sample from the K most likely (default: all)")
    sample.add_argument(
        "--prompt", default="", metavar="TEXT", help="text to continue, or - for standard input (default: none)"
    )
    sample.add_argument("--seed", type=_whole(0), default=0, metavar="N", help="random seed (default: 0)")
    sample.set_defaults(run=_sample)

    forecast = commands.add_parser(
        "forecast",
        help="continue a time series",
        description="Forecast the rows that follow a table, with the methods that retrograd train series has chosen. "
        "Writes a CSV file and a plot.",
    )
    forecast.add_argument("model", metavar="MODEL", help=f"the directory of a run, or its {MODEL}")
    forecast.add_argument(
        "data", metavar="DATA.csv", help="a table with the columns of the training data, or - for standard input"
    )
    forecast.add_argument(
        "--output", metavar="FILE", help="the forecast (default: DATA-forecast.csv in the current directory)"
    )
    forecast.add_argument("--plot", metavar="FILE", help="the plot, .svg or .png (default: next to the output, .svg)")
    forecast.add_argument(
        "--gaps",
        choices=("refuse", "interpolate"),
        help="how to handle missing values (default: as in training)",
    )
    forecast.add_argument(
        "--decimal", choices=("auto", "point", "comma"), help="decimal mark of the numbers (default: as in training)"
    )
    forecast.add_argument(
        "--use",
        choices=USES,
        metavar="METHOD",
        help=f"forecast with one method: {', '.join(USES)} (default: what was chosen in training)",
    )
    forecast.set_defaults(run=_forecast)


def _add_training(
    parser: argparse.ArgumentParser,
    kind: str,
    settings: type[Settings],
    make: Callable[[Settings, list[str], Path, Group], Task],
) -> None:
    settings.add_arguments(parser)
    where = parser.add_argument_group("run directory")
    where.add_argument(
        "--output", metavar="DIR", help="the directory (default: a new one in runs/, named after the data)"
    )
    where.add_argument("--overwrite", action="store_true", help="replace the run in the directory")
    where.add_argument(
        "--resume",
        metavar="DIR",
        help="continue the run in this directory; the result is bitwise that of a single run. --steps extends it",
    )
    parser.set_defaults(run=_train, kind=kind, settings=settings, make=make)


def _text_task(settings: Settings, files: list[str], folder: Path, group: Group) -> Task:
    assert isinstance(settings, TextSettings)
    return TextTask(settings, files, scratch=folder, group=group)


def _series_task(settings: Settings, files: list[str], folder: Path, group: Group) -> Task:
    assert isinstance(settings, SeriesSettings)
    if not files:
        raise InputError("DATA.csv is missing: the table to train on")
    return SeriesTask(settings, files[0], group)


# ---- train -----------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    settings: type[Settings] = options.settings
    given = {name: getattr(options, name) for name, *_ in settings.options() if hasattr(options, name)}
    files = [options.files] if isinstance(options.files, str) else list(options.files or [])
    try:
        ranks = world(launched_ranks() or 1)
    except ImportError as error:
        raise InputError(str(error)) from None
    with _failing_together(ranks):
        try:
            if ranks.rank:
                return _join(options, ranks)
            with Progress() as progress:
                if options.resume is not None:
                    return _resume(options, given, files, ranks, progress)
                return _begin(options, settings(**given), given, files, ranks, progress)
        except MemoryError:
            raise RunError("not enough memory; reduce --hidden, --layers or --batch") from None


def _begin(
    options: argparse.Namespace,
    settings: Settings,
    given: dict[str, Any],
    files: list[str],
    ranks: Group,
    progress: Progress,
) -> int:
    if settings.shards is None:
        settings = dataclasses.replace(settings, shards=1 if launched_ranks() is None else _SHARDS)
    group = _shards_on(ranks, settings)
    with contextlib.ExitStack() as held:
        with _new_folder(options, files) as folder, with_standard_input(files, folder) as files:
            held.enter_context(_alone_in(folder))
            if isinstance(settings, SeriesSettings) and files and (panel := read_panel(files[0], settings)) is not None:
                if ranks.size > 1:
                    raise InputError(f"{panel.name} is a panel, which one rank fits, on --threads processes")
                train_panel(panel, settings, given, folder, progress, lambda: _remove_old(folder, files))
                return 0
            _use_threads(settings)
            task = held.enter_context(contextlib.closing(options.make(settings, files, folder, group)))
            _remove_old(folder, files)
        files = [os.path.abspath(file) for file in files]
        ranks.broadcast((settings, files))
        return _run(Run(task, folder, files, progress))


def _remove_old(folder: Path, files: list[str]) -> None:
    """Remove the files of an earlier run, but not the standard input, which was just saved."""
    for old in (*FILES, FORECAST):
        if str(folder / old) in files:
            continue
        try:
            (folder / old).unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{folder / old} cannot be replaced: {error.strerror}") from None
    remove_parts(folder, (*FILES, FORECAST))


def _resume(
    options: argparse.Namespace, given: dict[str, Any], files: list[str], ranks: Group, progress: Progress
) -> int:
    folder, kind = Path(options.resume), options.settings
    if options.output is not None or options.overwrite:
        raise InputError("--resume continues in the directory of the run; --output and --overwrite are for a new one")
    metadata = read_checkpoint(folder, options.kind)
    for name, value in given.items():
        had = metadata["settings"].get(name)
        if name not in kind.CHANGEABLE and value != had:
            raise InputError(
                f"--{name.replace('_', '-')} cannot change when a run is resumed: the run has {shown(had)}, not "
                f"{shown(value)}"
            )
    try:
        # More steps are given to the run, which says what they change.
        steps = given.pop("steps", None)
        settings = kind.from_record({**metadata["settings"], **given})
        check_room(folder / CHECKPOINT, settings.least_weights())
    except InputError as error:
        raise InputError(f"{folder / CHECKPOINT}: {error}") from None
    group = _shards_on(ranks, settings)
    _use_threads(settings)
    with contextlib.ExitStack() as held:
        held.enter_context(_alone_in(folder))
        # Files that have moved can be given again.
        files = files or [saved_standard_input(file, folder) for file in metadata["files"]]
        with with_standard_input(files, folder) as files:
            task = held.enter_context(contextlib.closing(options.make(settings, files, folder, group)))
            files = [os.path.abspath(file) for file in files]
            run = Run(task, folder, files, progress)
            remove_parts(folder, FILES)
            run.resume(metadata, steps)
        ranks.broadcast((settings, files))
        return _run(run)


# ---- with several ranks ----------------------------------------------------------------------------------------------


def _join(options: argparse.Namespace, ranks: Group) -> int:
    """Take part in the run that rank 0 begins or resumes, once its data and options have proved to be usable."""
    given: Any = None
    settings, files = ranks.broadcast(given)
    _use_threads(settings)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(options.make(settings, files, Path(folder), _shards_on(ranks, settings))) as task,
    ):
        try:
            return _run(Run(task, Path(folder), files, SilentProgress()))
        except RunError:  # training has diverged, which rank 0 reports
            return 1


def _shards_on(ranks: Group, settings: Settings) -> Group:
    assert settings.shards is not None
    if settings.shards < ranks.size:
        raise InputError(
            f"there are {ranks.size} ranks, but --shards is {settings.shards}: each rank needs at least one shard of a "
            "batch"
        )
    return ranks.with_shards(settings.shards)


@contextlib.contextmanager
def _failing_together(ranks: Group) -> Iterator[None]:
    """If this rank fails, report the error and end all ranks: the others would wait for it for ever."""
    if ranks.size == 1:
        yield
        return
    try:
        yield
    except RankError:
        sys.exit(1)  # the rank that failed reports it
    except (InputError, RunError) as error:
        where = f"rank {ranks.rank}: " if ranks.rank else ""
        print(f"retrograd: error: {where}{error}", file=sys.stderr, flush=True)
        ranks.abort(2 if isinstance(error, InputError) else 1)
    except BaseException as error:
        # As if nothing caught it: the hook prints it with its rank, and ends all ranks.
        sys.excepthook(type(error), error, error.__traceback__)


def _use_threads(settings: Settings) -> None:
    if settings.threads is not None:
        rg.set_num_threads(settings.threads)


def _run(run: Run) -> int:
    run.train()
    return 0 if run.signal is None else _INTERRUPTED + run.signal


@contextlib.contextmanager
def _new_folder(options: argparse.Namespace, files: list[str]) -> Iterator[Path]:
    """Create the directory of a new run. If the run cannot start, directories created for it are removed."""
    if options.output is not None:
        folder = Path(options.output)
        _check_free(folder, files, options.overwrite)
    else:
        about = "stdlib" if not files else "stdin" if files[0] == STANDARD_INPUT else Path(files[0]).stem
        folder = _unused(Path("runs") / f"{options.kind}-{about}")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder} is a file, not a folder") from None
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be created: {error.strerror}") from None
    try:
        yield folder
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _check_free(folder: Path, files: list[str], overwrite: bool) -> None:
    """Refuse a directory with files of a run, unless `overwrite`, and one where the run would overwrite its data."""
    there = [name for name in (*FILES, FORECAST) if (folder / name).exists()]
    for name in there:
        if any(os.path.exists(file) and os.path.samefile(folder / name, file) for file in files):
            raise InputError(f"the run would replace its own data, {folder / name}: name another folder")
    if CHECKPOINT in there and not overwrite:
        where = quoted(folder)
        raise InputError(f"{folder} has a run already: --resume {where} continues it, --overwrite replaces it")
    if there and not overwrite:
        raise InputError(f"{folder} has a {there[0]} already: --overwrite replaces it")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock the directory: a second run at the same time is refused, because it would replace the files."""
    if os.name != "posix":
        yield
        return
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise InputError(f"another run is active in {folder}") from None
    except OSError:
        pass  # some file systems have no locks
    try:
        yield
    finally:
        os.close(lock)


def _unused(folder: Path) -> Path:
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


# ---- sample, forecast ------------------------------------------------------------------------------------------------


def _sample(options: argparse.Namespace) -> int:
    model, alphabet = load_text_model(options.model)
    prompt = _prompt(options.prompt, alphabet)
    pieces = sample(
        model,
        alphabet,
        options.length,
        temperature=options.temperature,
        top_k=options.top_k,
        prompt=prompt,
        seed=options.seed,
    )
    # Generated text may contain terminal control characters; files and pipes get it unchanged.
    terminal = sys.stdout.isatty()
    for piece in itertools.chain([prompt], pieces):
        print(visible(piece) if terminal else piece, end="", flush=terminal)
    print()
    return 0


def _prompt(given: str, alphabet: Alphabet) -> str:
    """Return the prompt, from standard input if it is "-", and warn of characters that the model does not know."""
    # Bytes that are not UTF-8 become lone surrogates, as in arguments of the command line.
    prompt = standard_input().read().decode("utf-8", "surrogateescape") if given == STANDARD_INPUT else given
    if unknown := alphabet.unknown_in(prompt):
        named = ", ".join(map(repr, unknown[:_MOST_NAMED])) + (", ..." if len(unknown) > _MOST_NAMED else "")
        what = "a character" if len(unknown) == 1 else f"{len(unknown)} characters"
        report(f"warning: the prompt has {what} that the model does not know, and reads as unknown: {named}")
    return prompt


def _forecast(options: argparse.Namespace) -> int:
    check_libraries()
    if options.data != STANDARD_INPUT:
        return _forecast_file(options, options.data)
    with tempfile.TemporaryDirectory() as folder, with_standard_input([STANDARD_INPUT], Path(folder)) as (saved,):
        return _forecast_file(options, saved)


def _forecast_file(options: argparse.Namespace, data: str) -> int:
    """Forecast a table; `data` is the file, or the copy of the standard input."""
    name, stem = options.data, Path(options.data).stem
    if name == STANDARD_INPUT:
        name, stem = "standard input", "stdin"
    if is_panel_model(options.model):
        if options.use is not None:
            raise InputError("--use is for the model of a single table: a panel keeps its combination, not the methods")
        output, picture = _written_files(options, data, name, stem)
        changed = {key: value for key in ("gaps", "decimal") if (value := getattr(options, key)) is not None}
        with Progress() as progress:
            forecast_panel(options.model, data, name, changed, output, picture if options.plot else None, progress)
        return 0
    forecaster = load_series_model(options.model)
    settings = forecaster.settings
    table = read_table(
        data,
        gaps=options.gaps or settings.gaps,
        decimal=options.decimal or settings.decimal,
        time=settings.time,
        name=name,
    )
    output, picture = _written_files(options, data, name, stem)
    result = forecast(forecaster, table, options.use)
    charts = [result.chart(target) for target in result.columns]
    drawn = png(charts) if picture.suffix == ".png" else stacked_svg(charts).encode()
    for path, content in ((output, result.csv_text().encode()), (picture, drawn)):
        try:
            write_whole(path, content)
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror or error}") from None
    with Progress() as progress:
        for note in result.notes:
            progress.prose(note)
        if result.verdict is not None:
            progress.prose(str(result.verdict))
        if options.use is not None or result.verdict is None:
            why = f"--use {options.use}" if options.use is not None else "an earlier release compared no other methods"
            progress.field("method", f"{', '.join(sorted(set(result.by.values())))} ({why})")
        progress.field("forecast", str(output))
        progress.field("plot", str(picture))
    return 0


def _written_files(options: argparse.Namespace, data: str, name: str, stem: str) -> tuple[Path, Path]:
    """Return the files of a forecast and its plot, which must not be each other or the data."""
    output = Path(options.output or f"{stem}-forecast.csv")
    _check_replaceable(output)
    picture = Path(options.plot) if options.plot else output.with_suffix(".svg")
    _check_replaceable(picture)
    if picture.suffix not in (".svg", ".png"):
        raise InputError(f"--plot {picture}: a picture ends in .svg or .png")
    if len({path.resolve() for path in (output, picture, Path(data))}) < 3:
        raise InputError(f"the data {name}, the output {output} and the plot {picture} must be three files")
    return output, picture


def _check_replaceable(path: Path) -> None:
    # The file is replaced, not written in place: a device would be lost.
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
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value
