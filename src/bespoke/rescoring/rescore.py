"""`bespoke rescore`: chooses among a recogniser's hypotheses with the language models of a finished run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from bespoke.errors import UserError
from bespoke.plain import JsonObject
from bespoke.rescoring.interpolation import ORACLE, Plan, Rescored, Tunable
from bespoke.rescoring.language import Level, RunLanguage
from bespoke.rescoring.nbest import Hypotheses
from bespoke.runs.events import Progress
from bespoke.storage import write_text

FORMULA = "score + weight * log P(text) + bonus * words"


def rescore(
    utterances: Sequence[Hypotheses],
    models: Mapping[str, tuple[RunLanguage, Level]],
    weight: Tunable = None,
    bonus: Tunable = None,
    progress: Progress | None = None,
) -> Rescored:
    """Rescore by models of runs: name -> (run, 'personal', 'group' or 'global')."""
    plan = Plan.of(utterances, weight, bonus)
    spoken = {name: run.spoken(level, utterances, progress) for name, (run, level) in models.items()}
    result = plan.rescored(spoken)
    result.notes.extend(dict.fromkeys(note for run, _ in models.values() for note in run.notes))
    return result


def of_run(run: RunLanguage, model: Level | Literal["all"]) -> dict[str, tuple[RunLanguage, Level]]:
    """The models of a run that are asked for, by name; 'all': those it has."""
    have = run.levels()
    if model == "all":
        return {level: (run, level) for level in have}
    if model not in have and model != "personal":
        raise UserError(f"--model {model}: {run.path} ({run.label}) has no such models; it has {', '.join(have)}")
    return {model: (run, model)}


def described(result: Rescored, about: JsonObject) -> JsonObject:
    """What rescore.json says."""
    systems = [system.to_json() for system in result.systems]
    return {**about, "formula": FORMULA, "utterances": result.counts(), "systems": systems, "notes": result.notes}


def write(result: Rescored, about: JsonObject, folder: Path) -> JsonObject:
    """Write rescore.json and chosen.jsonl: what each system chose of every utterance."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    lists = result.plan.lists
    for place, (utterance, split) in enumerate(zip(lists.utterances, result.plan.splits)):
        known = utterance.reference is not None
        chosen = {
            system.name: {
                "text": utterance.texts[system.places[place]],
                **({"errors": int(lists.errors[place, system.places[place]])} if known else {}),
            }
            for system in result.systems
            if known or system.name != ORACLE
        }
        said = {"reference": utterance.reference} if known else {}
        lines.append({"id": utterance.id, "client": utterance.client, "split": split, **said, "chosen": chosen})
    write_text(folder / "chosen.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    record = described(result, about)
    write_text(folder / "rescore.json", json.dumps(record, indent=1, ensure_ascii=False))
    return record
