"""bespoke run, bespoke tune"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from bespoke.cli.app import Jobs, Json, Resume, app
from bespoke.cli.folders import place, resumable
from bespoke.cli.say import print_json, this_command
from bespoke.errors import UserError


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. stage.0.lr=0.1 (repeatable)"),
    ] = None,
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
    from bespoke.config import read_config

    config = read_config(experiment, settings)
    folder = place(out, experiment.stem, resume, "run")
    with resumable(folder):
        from bespoke.experiments import build, load_population, to_toml
        from bespoke.forgotten import without_forgotten
        from bespoke.progress import Bars
        from bespoke.rounds import Run
        from bespoke.runfolder import RunFolder

        text = to_toml(config)
        begun = folder / "config.toml"
        if resume and begun.exists() and begun.read_bytes() != text.encode():
            raise UserError(
                f"{folder} was begun with another configuration than this one, or its config.toml was changed; resume "
                "with the same file and --set options, or leave --resume out and choose another --out"
            )
        built = build(config, without_forgotten(load_population(config), folder), folder=folder)
        run_folder = RunFolder.create(folder, text)
        with Bars(f"running {built.label}", quiet=as_json) as bars, bars.stopping() as stop, run_folder.locked():
            for note in built.population.about.get("notes", []):
                bars.note(note)
            result = Run(built, run_folder, bars, stop=stop).run()
    if as_json:
        from bespoke.metrics.parts import without_names

        print_json({**(without_names(result) if "privacy" in result else result), "folder": str(folder)})
        return
    better = "lower" if result["lower_is_better"] else "higher"
    mean = "undefined" if result["query"] is None else f"{result['query']:.5g}"
    print(
        f"{result['label']}: mean {result['metric']} per client {mean} ({better} is better), "
        f"{result['clients']} clients, {result['rounds']} rounds"
    )
    for sentence in _guarantee(result):
        print(sentence)
    print(f"Run folder: {folder}")


def _guarantee(result: dict[str, Any]) -> list[str]:
    """What a private run promises, in a few lines; nothing for others."""
    from bespoke.metrics.guarantee import sentences

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
        from bespoke.catalogue import describe_presets, print_presets

        found = describe_presets()
        print_json(found) if as_json else print_presets(found)
        return
    if experiment is None:
        raise UserError("which experiment is to be tuned? bespoke tune EXPERIMENT.toml (or --presets)")
    from bespoke.tuning import Tuning, freeze_into, read_tuning

    raw, asked = read_tuning(experiment, settings, space, preset, optuna, trials)
    folder = place(out, f"tune-{experiment.stem}", resume, "tune")
    tuning = Tuning.of(raw, asked, folder, str(experiment), name=experiment.stem, command=this_command(), jobs=jobs)
    target = freeze_into(freeze, raw) if freeze is not None else None
    with resumable(folder):
        from bespoke.progress import Bars

        with Bars(f"tuning {experiment}", quiet=as_json) as bars, bars.stopping() as stop:
            tuning.progress, tuning.stop = bars, stop
            about = tuning.run()
    if target is not None:
        from bespoke.tuning import frozen

        frozen(about, target.stem).write(target)
    if as_json:
        print_json({**about, "folder": str(folder), "preset": str(target) if target else None})
        return
    from bespoke.reports.trials import print_trials

    print_trials(about, folder)
    if target is not None:
        print(f"Preset: {target} (bespoke tune --preset {freeze}, or preset = {json.dumps(freeze)} in [compare])")
