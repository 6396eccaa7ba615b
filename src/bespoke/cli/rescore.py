"""The command `bespoke rescore`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bespoke.cli.app import Json, app
from bespoke.cli.console import print_json
from bespoke.cli.output_folder import place
from bespoke.errors import UserError, unknown

if TYPE_CHECKING:
    from bespoke.rescoring.interpolation import Rescored
    from bespoke.statistics.significance import Interval

MODELS = ("personal", "group", "global", "all")


@app.command()
def rescore(
    nbest: Annotated[
        Path, typer.Argument(metavar="NBEST", help="A JSON Lines file; each line is an utterance with its hypotheses.")
    ],
    run: Annotated[Path, typer.Option(metavar="RUN", help="The folder of a finished run with a language model.")],
    client: Annotated[
        str | None, typer.Option(metavar="ID", help="The client of the utterances whose line names no client.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="personal, group, global, or all (every model that the run has).")
    ] = "all",
    weight: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Weight of the language model, or tune (default).")
    ] = None,
    bonus: Annotated[str | None, typer.Option(metavar="NUMBER", help="Bonus per word, or tune (default).")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: runs/rescore-NAME).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose among a speech recogniser's hypotheses with personal language models, and report word error rates.

    `bespoke rescore nbest.jsonl --run runs/compare-posts/runs/finetune-seed0`

    Weight and bonus are tuned on validation utterances with references. See docs/rescoring.md for
    the file format and the formula.
    """
    settings = _setting(weight, "--weight"), _setting(bonus, "--bonus")
    if model not in MODELS:
        raise unknown("model", model, MODELS, "--model")
    from bespoke.cli.progress import Bars
    from bespoke.rescoring.language import RunLanguage
    from bespoke.rescoring.nbest import read_nbest
    from bespoke.rescoring.rescore import of_run, write
    from bespoke.rescoring.rescore import rescore as rescored

    utterances = read_nbest(nbest, client)
    folder = place(out, f"rescore-{nbest.stem}", False, "rescore")
    with Bars(f"bespoke rescore: {len(utterances):,} utterances", quiet=as_json) as bars:
        result = rescored(utterances, of_run(RunLanguage(run), model), *settings, bars)  # type: ignore[arg-type]
    record = write(result, {"nbest": str(nbest), "run": str(run)}, folder)
    if as_json:
        print_json({**record, "folder": str(folder)})
    else:
        _show(result, folder)


def _setting(text: str | None, option: str) -> float | str | None:
    if text is None or text == "tune":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (option == "--weight" and value < 0):
        least = " of zero or more" if option == "--weight" else ""
        raise UserError(f"{option} {text}: it has to be a number{least}, or 'tune'")
    return value


def _show(result: Rescored, folder: Path) -> None:
    from rich.table import Table

    from bespoke.terminal import Terminal

    console, counts = Terminal(), result.counts()
    table = Table(box=None, padding=(0, 2, 0, 0), title="Word error rate of test utterances in %", title_justify="left")
    for head in ("", "WER", "95 % interval", "change", "95 % interval", "weight", "bonus"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for system in result.systems:
        cells = [_percent(system.wer, system.interval), _percent(system.difference, system.difference_interval)]
        if system is result.systems[0]:
            cells[1] = ["", ""]
        settings = ["" if value is None else f"{value:g}" for value in (system.weight, system.bonus)]
        table.add_row(system.name, *cells[0], *cells[1], *settings)
    console.print(table)
    lines = [
        f"{counts['test']:,} test utterances, {counts['test_references']:,} of them with a reference "
        f"({counts['test_words']:,} words); {counts['validation']:,} validation utterances, "
        f"{counts['validation_references']:,} of them with a reference.",
        *result.notes,
        f"Chosen hypotheses: {folder / 'chosen.jsonl'}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _percent(value: float | None, interval: Interval | None) -> list[str]:
    """A rate and its interval; dashes where no test utterance has a reference."""
    if value is None or interval is None:
        return ["–", "–"]
    shown = [f"{100 * number:.1f}".replace("-", "−") for number in (value, interval.low, interval.high)]
    return [shown[0], f"{shown[1]} to {shown[2]}"]
