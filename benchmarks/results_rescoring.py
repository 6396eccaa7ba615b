"""The chapter "Rescoring" of docs/results.md: Table 5 of Group Personalized FL beside ours."""

import json
from pathlib import Path
from typing import Any

TITLE = "## Rescoring: Group Personalized FL's Table 5"
PAPER = {"no LM": 26.83, "FL": 26.56, "PerFL": 26.16, "GroupFL": 26.32, "GroupPerFL": 26.09}  # WER in %
LIKE = {"paper": "weight 0.10 for all methods, word bonus tuned", "tuned": "weight and word bonus tuned"}

HEADER = f"""{TITLE}

Liu et al. rescore 20-best lists of an in-house recogniser of videos (80 million parameters, trained on the same
videos) with a weight of 0.10. Their speech is not public. Here espeak-ng speaks segments of TED talks, with one voice
per talk, and Whisper tiny.en recognises them without punctuation. The segments are each talk's validation and test
segments, on which no language model was trained. The order of the methods can be compared with the paper, the numbers
cannot. Bonus and weight are tuned on validation utterances ([rescoring](rescoring.md)). Intervals are over test
utterances. A change is the paired difference from the recogniser's first hypothesis. "No LM, word bonus" is the
control: the effect of the bonus alone.
"""


def section(folder: Path) -> str:
    """The whole chapter, from a folder of `benchmarks/rescoring.py`."""
    found = {name: json.loads((folder / name / "rescore.json").read_text(encoding="utf-8")) for name in LIKE}
    about = found["paper"]
    counts = about["utterances"]
    lines = [
        HEADER,
        f"### {about['data']}, seed {about['seed']}",
        "",
        f"{counts['test']} test utterances ({counts['test_words']:,} words), {counts['validation']} validation "
        "utterances.",
        "Command: `python benchmarks/rescoring.py runs/language-ted --out runs/rescoring-ted --utterances "
        f"{counts['test'] + counts['validation']}`",
        "",
        f"| WER in % | {' | '.join(system['name'] for system in about['systems'])} |",
        f"| --- |{' ---: |' * len(about['systems'])}",
        _row("the paper", [f"{PAPER[s['name']]:.2f}" if s["name"] in PAPER else "" for s in about["systems"]]),
    ]
    for name, told in found.items():
        lines += [
            _row(LIKE[name], [f"{100 * s['wer']:.1f}" for s in told["systems"]]),
            _row("95 % interval", [_interval(s["interval"]) for s in told["systems"]]),
            _row("change", ["", *(_signed(s["difference"]) for s in told["systems"][1:])]),
            _row("95 % interval", ["", *(_interval(s["difference_interval"]) for s in told["systems"][1:])]),
            _row("weight, bonus", [_setting(s) for s in told["systems"]]),
        ]
    return "\n".join([*lines, "", *(f"- {_verdict(LIKE[name], told)}" for name, told in found.items())]) + "\n"


def _verdict(how: str, told: dict[str, Any]) -> str:
    """Whether rescoring helps, in words."""
    systems = {system["name"]: system for system in told["systems"]}
    best = min((systems[name] for name in PAPER if name != "no LM"), key=lambda system: system["wer"])
    low, high = (best["difference_interval"][end] for end in ("low", "high"))
    control = systems["no LM, word bonus"]["wer"]
    change = f"{_signed(best['difference'])} points, 95 % interval {_interval(best['difference_interval'])}"
    falls = "falls" if high < 0 else "rises" if low > 0 else "does not fall beyond chance"
    alone = "less than the bonus alone" if control <= best["wer"] else "more than the bonus alone"
    ordered = sorted((name for name in PAPER if name != "no LM"), key=lambda name: systems[name]["wer"])
    order = ", ".join(f"{name} {100 * systems[name]['wer']:.2f}" for name in ordered)
    return (
        f"{how[0].upper()}{how[1:]}: the word error rate {falls} with {best['name']}, the best of the four ({change}), "
        f"{alone} ({100 * control:.1f} %). From lowest to highest: {order} %; the paper's order is GroupPerFL, PerFL, "
        "GroupFL, FL."
    )


def _row(title: str, cells: list[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def _interval(ends: dict[str, float]) -> str:
    return f"{_number(ends['low'])} to {_number(ends['high'])}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{_number(value)}"


def _number(value: float) -> str:
    return f"{100 * value:.1f}".replace("-", "−")


def _setting(system: dict[str, Any]) -> str:
    return "" if system["weight"] is None else f"{system['weight']:g}, {system['bonus']:g}"
