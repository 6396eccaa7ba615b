"""Notes what every Python process is doing, twenty times a second: Python runs this where PYTHONPATH names the folder.

A thread looks at the main thread's stack. Each change is a line of $STOPWATCH/PID.jsonl, [seconds since the epoch,
what], and so is every half second without one, so that a process that is killed has an end. Benchmarks alone use this.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

EVERY, AT_LEAST = 0.02, 0.5  # seconds
WAITING = "waiting"  # of the first process for the others, or of one of these for work
# what is done, by (the last three parts of a file's path, function); of several frames the outermost says it
DOES = {
    ("bespoke/runs/training.py", "_stage"): "training",
    ("bespoke/study/references.py", "reference"): "training",  # the fit in one place that methods are held against
    ("bespoke/runs/evaluation.py", "final"): "scoring",
    ("bespoke/runs/evaluation.py", "selection"): "scoring",
    ("bespoke/runs/results.py", "write"): "results written",
    ("bespoke/experiment/loading.py", "load_population"): "data",
    ("bespoke/experiment/build.py", "prepared"): "data",
    ("bespoke/experiment/experiment.py", "engine_choice"): "choice of the engine",
    ("bespoke/cli/console.py", "show_report"): "report",
    ("bespoke/study/scheduler.py", "_start"): "processes started and ended",
    ("bespoke/study/scheduler.py", "__exit__"): "processes started and ended",
    ("bespoke/study/scheduler.py", "_together"): WAITING,
}
SERVES = "multiprocessing/resource_tracker.py"  # a process of multiprocessing's own, which only waits
OTHERWISE = {  # where no frame says it
    ("bespoke/study/comparison.py", "run"): "other work",
    ("bespoke/study/run_process.py", "_serve"): "other work",
}


def doing(frame: FrameType | None) -> str:
    """What a stack is about; "imports" where modules are imported outside of training and scoring."""
    found, otherwise, importing, listening = "", "start", False, False
    while frame is not None:  # from the innermost frame to the outermost
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        place = "/".join(path.replace("\\", "/").split("/")[-3:]), name
        found, otherwise = DOES.get(place, found), OTHERWISE.get(place, otherwise)
        importing = importing or path.startswith("<frozen importlib")
        listening = listening or (name == "recv" and path.endswith("connection.py")) or path.endswith(SERVES)
        frame = frame.f_back
    if importing and found not in ("training", "scoring"):
        return "imports"
    return found or (WAITING if listening else otherwise)


def watch(path: Path, main: int) -> None:
    last, noted = "", 0.0
    with path.open("w", encoding="utf-8", buffering=1) as log:
        while True:
            now, what = time.time(), doing(sys._current_frames().get(main))
            if what != last or now - noted > AT_LEAST:
                log.write(json.dumps([now, what]) + "\n")
                last, noted = what, now
            time.sleep(EVERY)


if "STOPWATCH" in os.environ:
    folder = Path(os.environ["STOPWATCH"])
    ident = threading.main_thread().ident
    assert ident is not None
    threading.Thread(target=watch, args=(folder / f"{os.getpid()}.jsonl", ident), daemon=True).start()
