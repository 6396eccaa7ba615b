"""Checks that this checkout and another commit write the same bytes, for changes that must not change any number.

    python benchmarks/same_bytes.py --against HEAD~3

Both run a few small experiments with the same data, seeds and folder names, one after the other, in separate processes.
Every file of the run folders is compared, except `timing.jsonl`, which holds seconds. Exit code 1 if a file differs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bespoke.cli.exit_codes import program
from bespoke.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
SECONDS = {"timing.jsonl"}
TOML = {
    "ditto.toml": """
seed = 3
[data]
source = "hsb82"
[cohort]
size = 40
dropout = 0.1
[[stage]]
method = "fedavg"
rounds = 4
lr = 0.1
[[stage]]
method = "ditto"
rounds = 3
""",
    "network.toml": """
[data]
source = "digits"
[model]
name = "mlp"
hidden = [16]
[engine]
kind = "looped"
[[stage]]
method = "fedavg"
rounds = 3
lr = 0.1
server = { name = "adam", lr = 0.01 }
[[stage]]
method = "finetune"
lrs = [0.1, 0.3]
epochs = 2
""",
}
COMMANDS = {
    "ditto": ["run", "ditto.toml", "--out", "ditto"],
    "private": ["run", "network.toml", "--out", "private"],
    # how it is executed is said: what a trial of both ways measures is in engine.json
    "compare": ["compare", "--data", "hsb82", "--seeds", "1", "--set", "engine.kind=vectorized", "--out", "compare"],
}


def written(source: Path, folder: Path, command: list[str]) -> dict[str, bytes]:
    """Every file that the command leaves, by its path within the folder."""
    for name, text in TOML.items():
        (folder / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(source), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bespoke", *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(f"{source}: bespoke {' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    out = folder / command[-1]
    files = (path for path in sorted(out.rglob("*")) if path.is_file() and path.name not in SECONDS)
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", help="the commit to compare with")
    arguments = parser.parse_args()
    differ = 0
    with tempfile.TemporaryDirectory() as temporary:
        other = Path(temporary) / "other"
        command = ["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(other), arguments.against]
        subprocess.run(command, check=True)
        try:
            for name, command in COMMANDS.items():
                found = []
                for source in (other, ROOT):
                    folder = Path(temporary) / source.name / name
                    folder.mkdir(parents=True)
                    found.append(written(source / "src", folder, command))
                before, now = found
                changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
                differ += len(changed)
                print(f"{name}: {len(now)} files, {len(changed)} differ", *changed, sep="\n  ")
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(other)], check=True)
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    program(main)
