"""The commands `bespoke run` and `bespoke tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bespoke.cli.app import Callbacks, Jobs, Json, Resume, app
from bespoke.cli.console import print_json, this_command
from bespoke.cli.output_folder import place, resumable
from bespoke.errors import UserError

if TYPE_CHECKING:
    from bespoke.records import RunRecord


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. stage.0.lr=0.1 (repeatable)"),
    ] = None,
    callbacks: Callbacks = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: runs/NAME of the file).")
    ] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Run one experiment file: stages of methods, then the personal models, into a run folder.

    `bespoke run exp.toml --set seed=1 --set stage.fedavg.lr=0.1 --out runs/exp-1` runs it with two keys changed.

    Ctrl-C stops after the current round; the message names the command that goes on, to the same bytes.
    """
    from bespoke.experiment.callbacks import separated, with_options
    from bespoke.experiment.checks import checked
    from bespoke.experiment.reading import read_experiment

    raw = with_options(read_experiment(experiment, settings), callbacks or [])
    raw.pop("tune", None)  # what `bespoke tune` is to try
    raw, separated_callbacks = separated(raw, where=f"{experiment}: callbacks")
    config = checked(raw, str(experiment))
    folder = place(out, experiment.stem, resume, "run")
    with resumable(folder):
        from bespoke.cli.progress import Bars
        from bespoke.devices import chosen
        from bespoke.experiment.build import build, to_toml
        from bespoke.experiment.loading import load_population
        from bespoke.runs.beginning import same_elsewhere
        from bespoke.runs.folder import RunFolder
        from bespoke.runs.forgotten import without_forgotten
        from bespoke.runs.training import Run

        chosen(config.engine.device)  # before anything is written
        text = to_toml(config)
        begun = folder / "config.toml"
        if resume and begun.exists() and begun.read_bytes() != text.encode():
            text = same_elsewhere(begun, config) or ""
        if not text:
            raise UserError(
                f"{folder} was begun with another configuration than this one, or its config.toml was changed; resume "
                "with the same file and --set options, or leave --resume out and choose another --out"
            )
        built = build(config, without_forgotten(load_population(config), folder), folder=folder)
        run_folder = RunFolder.create(folder, text)
        with Bars(f"running {built.label}", quiet=as_json) as bars, bars.stopping() as stop, run_folder.locked():
            for note in built.population.about.get("notes", []):
                bars.note(note)
            result = Run(built, run_folder, bars, stop=stop, callbacks=separated_callbacks).run()
    if as_json:
        from bespoke.statistics.parts import without_names

        print_json({**(without_names(result) if "privacy" in result else result), "folder": str(folder)})
        return
    better = "lower" if result["lower_is_better"] else "higher"
    mean = "undefined" if result["query"] is None else f"{result['query']:.5g}"
    print(
        f"{result['label']}: mean {result['metric']} per client {mean} ({better} is better), "
        f"{result['clients']} clients, {result['rounds']} rounds"
    )
    for ended in result.get("stopped", []):
        which = f"stage {ended['stage']} ({ended['method']}) after round {ended['round']} of {ended['of']}"
        print(f"{ended['by']} ended {which}: {ended['why']}")
    for sentence in _guarantee(result):
        print(sentence)
    print(f"Run folder: {folder}")


def _guarantee(result: RunRecord) -> list[str]:
    """What a private run promises, in a few lines; nothing for others."""
    from bespoke.report.guarantee import sentences

    return sentences(result["privacy"]) if "privacy" in result else []


@app.command()
def tune(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment file, with or without [tune].")
    ] = None,
    space: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What to try: a TOML file with what a [tune] table holds.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to try and what to hold fixed, as a paper did.")
    ] = None,
    optuna: Annotated[
        bool, typer.Option("--optuna", metavar="", help="Search (TPE, with pruning) instead of trying everything.")
    ] = False,
    trials: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many settings to try with --optuna (default: 20).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. stage.0.rounds=20"),
    ] = None,
    callbacks: Callbacks = None,
    jobs: Jobs = None,
    freeze: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Keep the tuned values as a preset: presets/NAME.toml, or a path."),
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", metavar="", help="List the presets and exit.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: runs/tune-NAME).")
    ] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Choose hyper-parameters on validation data; test rows are never looked at.

    `bespoke tune exp.toml` tries what the file's [tune.space] lists, or else what its methods advise, and writes
    `best.toml`, ready for `bespoke run`. In the file:

    `[tune.space.fedavg]`  `lr = [0.01, 0.1]`  `server.lr = {low = 0.1, high = 10.0, log = true}`

    `bespoke tune exp.toml --preset motley-school` tries the grid of a paper; `bespoke tune --presets` lists them.

    `bespoke tune exp.toml --optuna --trials 50 --freeze mine` searches, and keeps the result as the preset `mine`.

    Ctrl-C stops after the current rounds; nothing finished is repeated by the command that the message names.
    """
    if presets:
        from bespoke.cli.descriptions import describe_presets, print_presets

        found = describe_presets()
        print_json(found) if as_json else print_presets(found)
        return
    if experiment is None:
        raise UserError("which experiment is to be tuned? bespoke tune EXPERIMENT.toml (or --presets)")
    from bespoke.experiment.callbacks import with_options
    from bespoke.study.tuning import Tuning, freeze_into, read_tuning

    raw, asked = read_tuning(experiment, settings, space, preset, optuna, trials)
    raw = with_options(raw, callbacks or [])
    folder = place(out, f"tune-{experiment.stem}", resume, "tune")
    tuning = Tuning.of(raw, asked, folder, str(experiment), name=experiment.stem, command=this_command(), jobs=jobs)
    target = freeze_into(freeze, raw) if freeze is not None else None
    with resumable(folder):
        from bespoke.cli.progress import Bars

        with Bars(f"tuning {experiment}", quiet=as_json) as bars, bars.stopping() as stop:
            tuning.progress, tuning.stop = bars, stop
            about = tuning.run()
    if target is not None:
        from bespoke.study.tuning import frozen

        frozen(about, target.stem).write(target)
    if as_json:
        print_json({**about, "folder": str(folder), "preset": str(target) if target else None})
        return
    from bespoke.report.trials import print_trials

    print_trials(about, folder)
    if target is not None:
        print(f"Preset: {target} (bespoke tune --preset {freeze}, or preset = {json.dumps(freeze)} in [compare])")
