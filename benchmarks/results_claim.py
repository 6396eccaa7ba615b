"""A paper's claim, what was found here, and the verdict: one class for the tables of claims of all papers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from results_converged import NO_CURVE, NOT_CONVERGED

HEAD = ("| claim | paper | here | reproduced |", "| --- | --- | --- | --- |")


@dataclass(frozen=True)
class Claim:
    """What a paper says of some methods. The verdict is shown only if the order of these methods means something."""

    text: str
    methods: tuple[str, ...]  # the names under which `unsettled` knows them; none: nothing was trained in rounds
    paper: str
    here: str
    verdict: str

    def judged(self, unsettled: Mapping[str, str], stop: int = 0) -> str:
        """The verdict, or why there is none; `unsettled` has the reason of every method that cannot be judged.

        `stop`: as many rounds as the paper has. It judges methods that still improve there, so ours are judged, too.
        """
        methods = dict.fromkeys(self.methods)
        reasons: dict[str, list[str]] = {}
        for name in methods:
            if name in unsettled:
                reasons.setdefault(unsettled[name], []).append(name)
        if not reasons:
            return self.verdict
        if list(reasons) == [NOT_CONVERGED] and stop:
            return f"{self.verdict}, after the paper's {stop} rounds; {_listed(reasons[NOT_CONVERGED])} still improved"
        if list(reasons) == [NO_CURVE] and len(reasons[NO_CURVE]) == len(methods):
            return f"not judged: {NO_CURVE}"
        told = [
            f"{why} of {_listed(names)}" if why == NO_CURVE else f"{_listed(names)} {why}"
            for why, names in reasons.items()
        ]
        return f"not judged: {'; '.join(told)}"

    def row(self, unsettled: Mapping[str, str]) -> str:
        return f"| {self.text} | {self.paper} | {self.here} | {self.judged(unsettled)} |"


def table(claims: Iterable[Claim], unsettled: Mapping[str, str]) -> list[str]:
    """The claims of a section, if there are any."""
    rows = [claim.row(unsettled) for claim in claims]
    return [*HEAD, *rows] if rows else []


def yes_or_no(holds: bool, large: bool = True) -> str:
    """`large`: the difference is as large as in the paper, too."""
    return ("yes" if large else "in order, not in size") if holds else "no"


def in_seeds(holds: Sequence[bool]) -> str:
    """The verdict on a claim that was held against every seed by itself."""
    times = sum(holds)
    word = "reproduced" if times == len(holds) else "not reproduced" if times == 0 else "mixed"
    return f"{word} ({times} of {len(holds)})"


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
