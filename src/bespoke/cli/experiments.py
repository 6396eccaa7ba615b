"""The commands `bespoke run` and `bespoke tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bespoke.cli.app import Address, Backend, Callbacks, Jobs, Json, Resume, app, placed
from bespoke.cli.console import print_json, this_command
from bespoke.cli.output_folder import place, resumable
from bespoke.errors import UserError

if TYPE_CHECKING:
    from bespoke.records import RunRecord


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Overrides a key of the file, e.g. stage.0.lr=0.1 (repeatable)."
        ),
    ] = None,
    callbacks: Callbacks = None,
    engine: Backend = None,
    address: Address = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: runs/NAME of the file).")
    ] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Run one experiment file: train its stages, then make and score personal models. All results are in a run folder.

    `bespoke run exp.toml --set seed=1 --set stage.fedavg.lr=0.1 --out runs/exp-1` runs it with two keys changed.

    Ctrl-C stops after the current round. The message then names the command that resumes the run; the result has the
    same bytes as a run without interruption.
    """
    from bespoke.experiment.callbacks import separated, with_options
    from bespoke.experiment.checks import checked
    from bespoke.experiment.reading import read_experiment

    raw = with_options(read_experiment(experiment, placed(settings, engine, address)), callbacks or [])
    raw.pop("tune", None)  # the search space of `bespoke tune`
    raw, separated_callbacks = separated(raw, where=f"{experiment}: callbacks")
    config = checked(raw, str(experiment))
    folder = place(out, experiment.stem, resume, "run")
    with resumable(folder):
        from bespoke.cli.progress import Bars
        from bespoke.experiment.build import build, to_toml
        from bespoke.experiment.loading import load_population
        from bespoke.runs.beginning import same_elsewhere
        from bespoke.runs.folder import RunFolder
        from bespoke.runs.forgotten import without_forgotten
        from bespoke.runs.places import at_its_places, check_places
        from bespoke.runs.training import Run

        check_places(config.engine)
        text = to_toml(config)
        begun = folder / "config.toml"
        if resume and begun.exists() and begun.read_bytes() != text.encode():
            text = same_elsewhere(begun, config) or ""
        if not text:
            raise UserError(
                f"{folder} was started with another configuration, or its config.toml was changed; resume "
                "with the same file and --set options, or leave --resume out and choose another --out"
            )
        built = build(config, without_forgotten(load_population(config), folder), folder=folder)
        run_folder = RunFolder.create(folder, text)
        with Bars(f"running {built.label}", quiet=as_json) as bars, bars.stopping() as stop, run_folder.locked():
            for note in built.population.about.get("notes", []):
                bars.note(note)
            asked = Run(built, run_folder, bars, stop=stop, callbacks=separated_callbacks)
            with at_its_places(asked, config.engine) as placed_run:
                result = placed_run.run()
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
    """The privacy guarantee of a private run in a few lines; empty for other runs."""
    from bespoke.report.guarantee import sentences

    return sentences(result["privacy"]) if "privacy" in result else []


@app.command()
def tune(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment file, with or without [tune].")
    ] = None,
    space: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file with the content of a [tune] table.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A preset: the values that a paper tried and the values that it fixed."),
    ] = None,
    optuna: Annotated[
        bool,
        typer.Option(
            "--optuna", metavar="", help="Search with Optuna (TPE, with pruning) instead of trying all combinations."
        ),
    ] = False,
    trials: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of settings to try with --optuna (default: 20).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Overrides a key of the file, e.g. stage.0.rounds=20 (repeatable)."
        ),
    ] = None,
    callbacks: Callbacks = None,
    jobs: Jobs = None,
    engine: Backend = None,
    address: Address = None,
    freeze: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Store the tuned values as a preset: presets/NAME.toml, or a path."),
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", metavar="", help="List the presets and exit.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: runs/tune-NAME).")
    ] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Tune hyper-parameters on validation rows. Query (test) rows are never used.

    `bespoke tune exp.toml` tries the values in the file's [tune.space]; without one, the values that its methods
    suggest. It writes `best.toml`, which `bespoke run` can run. An example of a space:

    `[tune.space.fedavg]`  `lr = [0.01, 0.1]`  `server.lr = {low = 0.1, high = 10.0, log = true}`

    `bespoke tune exp.toml --preset motley-school` tries the grid of a paper; `bespoke tune --presets` lists them.

    `bespoke tune exp.toml --optuna --trials 50 --freeze mine` searches, and stores the result as the preset `mine`.

    Ctrl-C stops after the current rounds. The message then names the command that resumes the tuning; finished trials
    are not repeated.
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

    raw, asked = read_tuning(experiment, placed(settings, engine, address), space, preset, optuna, trials)
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
