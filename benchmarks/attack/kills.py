"""Commands that are killed at a random moment and resumed: the results are those of an uninterrupted run.

A kill comes from inside, before, during or after an event of the folder, or from outside after a random time. From
outside it may also be SIGINT (Ctrl-C) or SIGTERM, on which a command ends by itself. Under secret noise no two runs are
equal: there the account must cover every message that was seen to leave a client.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.attack.campaign import Verdict
from benchmarks.attack.child import CRASH, SECONDS, STOPPED, Ended, bespoke
from benchmarks.attack.events import WHEN, Events, watch_messages
from benchmarks.attack.worlds import Case, cases

KILLED = -signal.SIGKILL
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
NOT_PROMISED = ("timing.jsonl", ".lock", "study.db")  # wall times, locks, Optuna's own notes
STATE = {"checkpoints", "private", "stages", "engine.json"}
TWICE = 0.3  # chance that the resumed command is killed too
SLOW = 180.0  # seconds in which a resumed command has to end


def attempt(draw: random.Random, number: int, folder: Path, references: Path) -> Verdict:
    """Kill one command, once or twice, resume it, and compare."""
    known = cases()
    random.Random(0).shuffle(known)  # so that a few tries are already of several kinds
    case = known[number % len(known)]
    about = reference(case, references)
    if about["problem"]:
        return Verdict(case.kind, f"{case.name}: not killed", about["problem"])
    case.write(folder)
    story, ended = [], []
    for kill in range(1 + (draw.random() < TWICE)):
        how = _kill(draw, about, folder / "messages.jsonl")
        story.append(str(how["story"]))
        resume = kill > 0 and (folder / "out").is_dir()
        ended.append(bespoke(case.words(resume), folder, kill_after=how["after"], by=how["by"], before=how["before"]))
    last = bespoke(
        case.words((folder / "out").is_dir()), folder, limit=SLOW,
        before=functools.partial(prepare, None, True, folder / "messages.jsonl"),
    )  # fmt: skip
    told = "\n".join(each.said for each in [*ended, last])
    return Verdict(case.kind, f"{case.name}: {'; '.join(story)}", _problem(case, about, ended, last, folder), said=told)


def prepare(events: Events | None, often: bool, messages: Path) -> None:
    """In the child: save state after every round, count events, write down messages."""
    from bespoke.runs.training import Run

    if often:
        Run.__init__ = functools.partialmethod(Run.__init__, checkpoint_seconds=0.0)  # type: ignore[method-assign, assignment]
    watch_messages(messages)
    if events is not None:
        events.install()


def _kill(draw: random.Random, about: dict[str, Any], messages: Path) -> dict[str, Any]:
    """When the next kill comes."""
    if draw.random() < 0.5 and about["events"]:
        at, when = draw.randrange(about["events"]), draw.choice(WHEN)
        before = functools.partial(prepare, Events(at, when), True, messages)
        return {"story": f"killed {when} event {at}", "after": SLOW, "by": signal.SIGKILL, "before": before}
    after, often, by = draw.random() * about["seconds"], draw.random() < 0.5, draw.choice(SIGNALS)
    before = functools.partial(prepare, None, often, messages)
    return {"story": f"{by.name} after {after:.3f} s", "after": after, "by": by, "before": before}


def _problem(case: Case, about: dict[str, Any], ended: list[Ended], last: Ended, folder: Path) -> str:
    """What is wrong with how it ended, if anything."""
    for each in ended:
        if each.code is None:
            return f"did not end within {SECONDS:.0f} s of being asked to"
        if each.code not in (0, KILLED, STOPPED) or CRASH in each.said:
            return f"ended by itself with code {each.code} before it was killed: {last_line(each.err)}"
        if each.orphans:
            return f"{each.orphans} processes outlived their parent"
    if last.code is None:
        return f"the resumed command took more than {SLOW:.0f} s"
    if last.code != 0 or CRASH in last.said:
        return f"resumed with code {last.code}: {last_line(last.err)}"
    if case.secret:
        return _understated(folder, about)
    return differences(contents(folder / "out"), contents(Path(about["folder"]) / "out"))


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing said")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that a command leaves and promises to leave so, by its path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in NOT_PROMISED)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def results(folder: Path) -> dict[str, bytes]:
    """The files that are a result, by their paths; state, from which a run goes on, is not."""
    found = contents(folder)
    return {name: content for name, content in found.items() if not set(Path(name).parts) & STATE}


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    """Which files are missing, new or other, in words; nothing if none."""
    missing, new = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = [name for name in expected if name in found and found[name] != expected[name]]
    parts = {"missing": missing, "unexpected": new, "other contents": other}
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)


def _understated(folder: Path, about: dict[str, Any]) -> str:
    """Whether the account says less than what was seen of the run."""
    from bespoke.privacy.accountant import gaussian_epsilon

    said, privacy = _result(folder), _result(Path(about["folder"]))
    for view in ("released", "messages"):
        here, whole = said["privacy"][view]["epsilon"], privacy["privacy"][view]["epsilon"]
        if here is not None and (whole is None or here < whole * (1 - 1e-9)):
            return f"epsilon of {view} is {here}, that of an uninterrupted run {whole}"
    budget = said["privacy"].get("budget")
    if budget is not None and (said["privacy"]["released"]["epsilon"] or float("inf")) > budget * (1 + 1e-9):
        return f"epsilon {said['privacy']['released']['epsilon']} is more than the budget {budget}"
    sent: Counter[str] = Counter()
    for line in (folder / "messages.jsonl").read_text(encoding="utf-8").splitlines():
        sent.update(json.loads(line)["clients"])
    local, noise = said["privacy"]["messages"]["epsilon"], about["local_noise"]
    most = max(sent.values())
    if noise and local is not None and local < gaussian_epsilon(most / noise**2, said["privacy"]["delta"]):
        return f"epsilon of messages is {local}, and {most} messages of one client were seen"
    return ""


def _result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "result.json").read_text(encoding="utf-8"))
    return found


def reference(case: Case, references: Path) -> dict[str, Any]:
    """The same command, left alone: its folder, how long it takes, how many events it has."""
    folder = once(references / "whole" / case.name, functools.partial(_left_alone, case))
    about: dict[str, Any] = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    return {**about, "folder": str(folder)}


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made if it is not there; several processes may ask for it at the same time."""
    if not folder.exists():
        making = folder.with_name(f"{folder.name}, {random.SystemRandom().getrandbits(32)}")
        making.mkdir(parents=True)
        make(making)
        try:
            making.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(making)
    return folder


def _left_alone(case: Case, folder: Path) -> None:
    """Run the command twice, to compare with and to count its events."""
    case.write(folder)
    alone = bespoke(case.words(), folder, limit=SLOW)
    counted = folder / "counted"
    counted.mkdir()
    case.write(counted)
    bespoke(case.words(), counted, limit=SLOW, before=functools.partial(_census, counted))
    about = {
        "seconds": alone.seconds, "events": (counted / "events").stat().st_size,
        "problem": "" if alone.code == 0 else f"fails without a kill, code {alone.code}: {last_line(alone.err)}",
        "local_noise": case.file.get("privacy", {}).get("local_noise"),
    }  # fmt: skip
    shutil.rmtree(counted)
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


def _census(folder: Path) -> None:
    """In the child: a byte in a file for every event."""
    file = open(folder / "events", "ab", buffering=0)  # noqa: SIM115  (lives as long as the child)

    class Counting(Events):
        def due(self, name: str) -> bool:
            file.write(b".")
            return False

    prepare(Counting(), True, folder / "messages.jsonl")
