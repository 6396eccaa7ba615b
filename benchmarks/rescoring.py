"""Second-pass rescoring, Table 5 of Group Personalized FL, by one command: speech, recognition, language models.

    bespoke compare benchmarks/groups/ted.toml --out runs/language-ted
    python benchmarks/rescoring.py runs/language-ted --out runs/rescoring-ted

espeak-ng speaks validation and test segments of talks, with one voice per talk. Whisper tiny.en recognises them with
20-best lists, in the format of `bespoke rescore`. Then FL, PerFL, GroupFL and GroupPerFL rescore them. No segment was
trained on. Needs: pip install 'bespoke-fl[speech]' ctranslate2 tokenizers. Finished lists are kept, so the command
continues where it was stopped.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

import results_rescoring
from bespoke.cli.exit_codes import program
from bespoke.cli.progress import Bars
from bespoke.data.population import Population
from bespoke.data.sources.speech.espeak import RATE as SPOKEN_RATE
from bespoke.data.sources.speech.espeak import Espeak, mixed
from bespoke.data.sources.speech.utterances import ORIGINALS, VOICES, shares
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.loading import load_population
from bespoke.randomness import mix, uniform
from bespoke.rescoring.interpolation import Plan
from bespoke.rescoring.language import RunLanguage
from bespoke.rescoring.nbest import Hypotheses, read_nbest
from bespoke.rescoring.rescore import write
from bespoke.runs.finished import open_run
from whisper import RATE, Whisper, model_folder

METHODS = {"FL": "fedavg", "PerFL": "finetune", "GroupFL": "group-fl", "GroupPerFL": "group-perfl"}
VALIDATION, TEST = 2, 4  # utterances of a talk
WEIGHT = 0.10  # the paper's, for all methods


def segments(experiment: Experiment, raw: Population, count: int) -> Iterator[tuple[str, int, str, str]]:
    """Who says what: (id, client, split, text), talks drawn by their keys, one segment of each at a time."""
    if "pieces" not in raw.columns:
        raise UserError(f"the texts of {raw.about['name']} are not kept as words: name a comparison on ted")
    parts = {"test": (experiment.split.test.query, TEST), "validation": (experiment.split.test.validation, VALIDATION)}
    both = np.intersect1d(*(rows.clients for rows, _ in parts.values()))
    drawn = both[np.argsort(uniform("rescoring", raw.keys[both]))][: -(-count // (VALIDATION + TEST))]
    listed = []
    for order, client in enumerate(drawn):
        for split, (rows, most) in parts.items():
            for turn, row in enumerate(rows.of(np.array([client]))[0][:most]):
                pieces = raw.columns["pieces"][int(row)].tolist()
                text = " ".join(raw.about["pieces"][piece - 1] for piece in pieces if piece)
                listed.append((turn, order, f"{raw.ids[client]}#{int(row)}", int(client), split, text))
    yield from (entry[2:] for entry in sorted(listed)[:count])


def recognised(
    experiment: Experiment, raw: Population, path: Path, count: int, cached: Path, bars: Bars
) -> list[Hypotheses]:
    """The lists of all utterances; those that the file does not hold yet are added to it."""
    wanted, population = list(segments(experiment, raw, count)), experiment.population
    kept = _kept(path)
    bars.begin("recognising", len(wanted), len([entry for entry in wanted if entry[0] in kept]))
    whisper = Whisper(model_folder(cached))
    with Espeak() as espeak, path.open("a", encoding="utf-8") as file:
        voices = {name: espeak.its_voice(name) for name in ORIGINALS}
        for name, client, split, text in wanted:
            if name in kept:
                continue
            voice = int(mix("voice", int(raw.keys[client]))) % VOICES
            espeak.take(mixed(voices, shares(voice)))
            sound = resample_poly(espeak.speak(text).astype(np.float32) / 2**15, RATE, SPOKEN_RATE).astype(np.float32)
            texts, scores = zip(*whisper.hypotheses(sound))
            said = Hypotheses(name, raw.ids[client], texts, scores, text, split, population.group_of(client) or None)
            file.write(json.dumps(said.to_json(), ensure_ascii=False) + "\n")
            file.flush()
            bars.advance()
    found = {utterance.id: utterance for utterance in read_nbest(path)}
    return [replace(found[name], split=split) for name, _, split, _ in wanted]  # of this run's split, whoever began it


def _kept(path: Path) -> set[str]:
    """The utterances of an earlier call; a last line that was cut off is removed."""
    if not path.exists():
        return set()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]), encoding="utf-8")
    return {utterance.id for utterance in read_nbest(path)} if any(line.endswith("\n") for line in lines) else set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, help="a comparison of fedavg, finetune, group-fl and group-perfl")
    parser.add_argument("--out", type=Path, default=Path("runs/rescoring-ted"))
    parser.add_argument("--utterances", type=int, default=480, help="two of three are tested (default: 480)")
    parser.add_argument("--seed", type=int, default=0, help="which of the comparison's seeds")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "bespoke" / "whisper")
    arguments = parser.parse_args()
    runs = {label: arguments.comparison / "runs" / f"{name}-seed{arguments.seed}" for label, name in METHODS.items()}
    if missing := [str(path) for path in runs.values() if not path.is_dir()]:
        raise UserError(f"there is no {missing[0]}: name a comparison of {', '.join(METHODS.values())}, see --help")
    _, config = open_run(runs["GroupPerFL"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    nbest = arguments.out / "nbest.jsonl"
    with Bars(f"rescoring: {arguments.comparison}") as bars:
        raw = load_population(config)
        experiment = build(config, raw, folder=runs["GroupPerFL"])
        utterances = recognised(experiment, raw, nbest, arguments.utterances, arguments.cache, bars)
        models = {label: RunLanguage(path, raw) for label, path in runs.items()}
        spoken = {label: run.spoken("personal", utterances, bars) for label, run in models.items()}
        about = {"comparison": str(arguments.comparison), "seed": arguments.seed, "data": raw.about["name"]}
        for name, weight in (("paper", WEIGHT), ("tuned", None)):
            write(Plan.of(utterances, weight).rescored(spoken), about, arguments.out / name)
    print(results_rescoring.section(arguments.out))


if __name__ == "__main__":
    program(main)
