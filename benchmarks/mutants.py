"""Small faults put into the code on purpose: which of them do the tests catch?

    python benchmarks/mutants.py                            # a sample of 100 over the files below, about 15 minutes
    python benchmarks/mutants.py --count 0 cohorts.py       # every fault in one file

A fault (mutant) is one change of the syntax tree: a comparison shifted or reversed, + for -, a constant changed, `not`
or a keyword argument dropped, min for max, a condition negated, two arguments exchanged. The program puts it into a
copy of src and tests in a temporary folder, never into the working tree, and runs the tests that belong to the file.
The sample is a function of the seed and the code. Faults that have no visible effect are listed in EQUIVALENT, each
with its reason, and do not count.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/bespoke")
SUITES = {  # the tests that should catch faults in a file
    "methods/parts/descend.py": ["test_descend.py"],
    "methods/fedrep.py": ["test_fedrep.py"],
    "methods/ensemble.py": ["test_hypcluster.py"],
    "methods/hypcluster.py": ["test_hypcluster.py"],
    "methods/parts/grouped.py": ["test_groups.py"],
    "methods/self_fl.py": ["test_self_fl.py", "test_self_fl_steps.py"],
    "methods/parts/server_optimizer.py": ["test_server_optimizer.py"],
    "experiment/variants.py": ["test_entries.py"],
    "federation/cohorts.py": ["test_sampling.py", "privacy/test_tally.py"],
    "experiment/choosing.py": ["test_selection.py"],
    "privacy/accountant.py": ["privacy/test_accounting.py"],
    "privacy/tally.py": ["privacy/test_tally.py"],
    "statistics/acceptance.py": ["statistics/test_acceptance.py"],
    "statistics/significance.py": ["statistics/test_significance.py"],
    "data/partition.py": ["data/test_partition.py"],
    "data/splits.py": ["test_splits.py"],
}
EQUIVALENT: dict[tuple[str, str], str] = {  # (file, the changed line) -> why it has no visible effect
    ("methods/ensemble.py", "return [self.task.fresh((seed - place)) for place in range(self.k)]"):
        "any k different seeds will do",
    ("methods/ensemble.py", "if all(params[name].shape == (self.k, *leaf.shape) for name, leaf in models[1].items()):"):
        "all draws have the same shapes",
    ("methods/hypcluster.py",
     'return {**server, "empty": torch.zeros(self.k), "loss": torch.tensor(1.0)} if self.reseed else server'):
        "the mean loss is used when a cluster has been empty for a round, and every round sets it",
    ("methods/parts/grouped.py",
     "return any(params[name].dim() > leaf.dim() for name, leaf in task.fresh(1).items())"):
        "all draws have the same shapes",
    ("methods/parts/grouped.py",
     "return all(params[name].dim() > leaf.dim() for name, leaf in task.fresh(0).items())"):
        "models lie stacked in all of their leaves or in none",
    ("federation/cohorts.py", "wanted = min(int(np.ceil(self.size * self.over_select - 2e-09)), len(everyone))"):
        "a billionth or two: both are above rounding and below any share that can be given",
    ("federation/cohorts.py", "with (np.errstate()):"): "hides a warning, changes no number",
    ("federation/cohorts.py", "slow = (_normal('speed', self.seed, keys) - _normal('luck', self.seed, round, keys))"):
        "luck is as often good as bad: the same distribution",
}  # fmt: skip

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.FloorDiv: ast.Mult,
}  # fmt: skip
HEAVY = (
    "torch.func",
    "numpy",
    "pandas",
    "pyarrow.parquet",
    "scipy.stats",
    "sklearn.metrics",
    "hypothesis",
    "pydantic",
    "dp_accounting",
)
PAIRS = (("min", "max"), ("argmin", "argmax"), ("minimum", "maximum"), ("any", "all"), ("mean", "sum"))
NAMES = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
ORDERED = ("where", "subtract", "sub", "divmod", "range")  # calls in which two arguments of one kind may be exchanged
DECLARATIONS = ("knob", "field", "ClassVar")  # calls that describe: what they say is not computed with


@dataclass(frozen=True)
class Mutant:
    """A file with one fault."""

    file: str
    line: int
    before: str  # the first line that differs
    after: str
    source: str


def faults(node: ast.AST) -> Iterator[ast.AST]:
    """This node with one fault each."""

    def changed(**parts: object) -> ast.AST:
        other = copy.deepcopy(node)
        for name, value in parts.items():
            setattr(other, name, value)
        return other

    match node:
        case ast.Compare(ops=[op]):
            yield from (changed(ops=[kind()]) for kind in COMPARISONS[type(op)])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield changed(op=OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield changed(op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=inner):
            yield inner
        case ast.Constant(value=bool(value)):
            yield changed(value=not value)
        case ast.Constant(value=int(value)):
            yield changed(value=value + 1)
        case ast.Constant(value=float(value)):
            yield changed(value=2 * value or 1.0)
        case ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield changed(test=ast.UnaryOp(ast.Not(), test))
        case ast.Name(id=name) if name in NAMES:
            yield changed(id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield changed(attr=NAMES[name])
        case ast.Call(args=args, keywords=keywords):
            if ast.unparse(node.func).split(".")[-1] in ORDERED and len(args) > 1:
                yield changed(args=[*args[:-2], args[-1], args[-2]])
            yield from (changed(keywords=keywords[:i] + keywords[i + 1 :]) for i, one in enumerate(keywords) if one.arg)


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that compute: without annotations, decorators, error messages and declarations."""
    match tree:
        case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.AnnAssign(value=None):
            return
        case ast.Call(func=ast.Name(id=name)) if name in DECLARATIONS:
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield ast.copy_location(ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), test)), test)  # to be negated
    yield tree
    for name, part in ast.iter_fields(tree):
        if name not in ("annotation", "returns", "decorator_list", "op", "ops", "ctx", "bases"):
            for child in part if isinstance(part, list) else [part]:
                declared = isinstance(tree, ast.ClassDef) and isinstance(child, ast.Assign | ast.AnnAssign)
                if isinstance(child, ast.AST) and not declared:
                    yield from nodes(child)


def mutants(file: str, source: str) -> list[Mutant]:
    """All faults of a file, in the order of its text."""
    raw = source.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[str, Mutant] = {}
    for node in nodes(ast.parse(source)):
        for other in faults(node):
            where = [starts[line - 1] + column for line, column in _ends(node)]
            text = ast.unparse(ast.fix_missing_locations(other))
            text = text if isinstance(other, ast.stmt | ast.Constant | ast.Name | ast.Attribute) else f"({text})"
            new = (raw[: where[0]] + text.encode() + raw[where[1] :]).decode()
            lines = next(p for p in zip(source.splitlines(), new.splitlines()) if p[0] != p[1])
            found[new] = Mutant(file, node.lineno, lines[0].strip(), lines[1].strip(), new)  # type: ignore[attr-defined]
    return [mutant for mutant in found.values() if _compiles(mutant.source)]


def _ends(node: ast.AST) -> list[tuple[int, int]]:
    return [(node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)]  # type: ignore[attr-defined]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class Bench:
    """A copy of the code and its tests in which faults are tried one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("src", "tests", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.seconds: dict[str, float] = {}
        for name in HEAVY:
            importlib.import_module(name)  # once: every trial is a fork of this process

    def passes(self, file: str) -> bool:
        """Whether the file's tests pass; running for more than three times as long as without a fault does not."""
        longest = 20 + 3 * self.seconds[file] if file in self.seconds else math.inf
        began = time.monotonic()
        child = os.fork()
        if not child:
            self._test(file)
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() - began > longest:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return False
            time.sleep(0.05)
        self.seconds.setdefault(file, time.monotonic() - began)
        return not (self.folder / "failed").exists()

    def _test(self, file: str) -> NoReturn:
        """In a process of its own: the copy comes first on the path, and nothing is printed."""
        os.setsid()
        os.chdir(self.folder)
        paths = [str(self.folder / "src"), str(self.folder / "tests")]
        sys.path[:0] = paths
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        failed = self.folder / "failed"
        failed.touch()  # until the tests have passed: a process that dies has failed
        names = [f"tests/{name}" for name in SUITES[file]]
        if pytest.main(["-x", "-q", "-p", "no:cacheprovider", *names]) == pytest.ExitCode.OK:
            failed.unlink()
        os._exit(0)

    def survives(self, mutant: Mutant) -> bool:
        path = self.folder / PACKAGE / mutant.file
        whole = path.read_bytes()
        path.write_text(mutant.source, encoding="utf-8")
        try:
            return self.passes(mutant.file)
        finally:
            path.write_bytes(whole)


def chosen(files: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` faults, as many of each file as there are; 0: all."""
    every = {file: mutants(file, (ROOT / PACKAGE / file).read_text(encoding="utf-8")) for file in files}
    if not count:
        return [mutant for listed in every.values() for mutant in listed]
    for file, listed in every.items():
        random.Random(f"{seed} {file}").shuffle(listed)
    turns = [every[file][turn] for turn in range(count) for file in files if turn < len(every[file])]
    return sorted(turns[:count], key=lambda mutant: (files.index(mutant.file), mutant.line, mutant.after))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="ends of file names, such as cohorts.py; default: all of SUITES")
    parser.add_argument("--count", type=int, default=100, help="how many faults; 0: all (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    files = [file for file in SUITES if not asked.files or file.endswith(tuple(asked.files))]
    if not files:
        parser.error(f"no file ends in {' or '.join(asked.files)}; there are: {', '.join(SUITES)}")
    sample = chosen(files, asked.count, asked.seed)
    counts = {file: [0, 0, 0] for file in files}  # caught, survived, equivalent
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        bench = Bench(Path(folder))
        for number, mutant in enumerate(sample, start=1):
            if mutant.file not in bench.seconds and not bench.passes(mutant.file):
                sys.exit(f"the tests of {mutant.file} fail without any fault: {', '.join(SUITES[mutant.file])}")
            same = (mutant.file, mutant.after) in EQUIVALENT
            outcome = 2 if same else int(bench.survives(mutant))
            counts[mutant.file][outcome] += 1
            if outcome == 1:
                print(f"survived  {PACKAGE / mutant.file}:{mutant.line}\n  - {mutant.before}\n  + {mutant.after}")
            print(f"{number} of {len(sample)}", end="\r", file=sys.stderr, flush=True)
    print("\n| file | faults | caught | survived | equivalent |\n|---|---:|---:|---:|---:|")
    counts["all"] = [sum(column) for column in zip(*counts.values())]
    for file, (caught, survived, same) in counts.items():
        print(f"| {file} | {caught + survived + same} | {caught} | {survived} | {same} |")
    caught, survived, _ = counts["all"]
    print(f"\ncaught: {100 * caught / max(caught + survived, 1):.1f} % of those that can be seen")
    sys.exit(survived > 0.05 * (caught + survived))


if __name__ == "__main__":
    main()
