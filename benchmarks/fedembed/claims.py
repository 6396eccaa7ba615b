"""The claims of FedEmbed's paper about its tables and figures, compared with our results.

Every verdict follows from means over seeds: of F1 by users, privacy and method (Tables 2 and 3), of F1 by the part of
users that like the same (Tables 4 and 5), and of the information in embeddings (Figures 3 to 5). A claim is left out if
a number that it needs is missing. A method whose training had not converged is never used for a verdict. `training`
names a method's training, because it differs from column to column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from results_claim import Claim, yes_or_no
from results_claim import table as claims_table

BASELINES = ("FedRep", "PFedMe", "PFedKM", "Global", "Global+")
OWN_HEADS = ("FedRep", "PFedMe", "FedEmbed-Personal")
GROUPED = ("FedEmbed-Prototype", "FedEmbed-Type")
EMBEDDED = ("Global+", "FedEmbed-Personal", "FedEmbed-SOM", "FedEmbed-Prototype")  # Figures 3 and 5
NO_KINDS = "FedEmbed-Type without kinds"
FIGURES = "figures"  # where models of Figures 3 to 5 were trained
CLOSE = 0.05 + 1e-9  # F1 that is "comparable" or "close": five hundredths, however they are rounded
MOST = 0.5  # of users whose preference is guessed: "most preferences are separated"
STRUCTURE = 0.1  # adjusted Rand index that a head for kinds has to add
WHOLE = 0.995  # of users guessed: "perfectly"

Column = tuple[str, str]  # users, privacy


def training(label: str, place: str) -> str:
    """The name of a method as it was trained for a column, or for the figures."""
    return f"{label} ({place})"


def trained(labels: Iterable[str], columns: Iterable[Column]) -> tuple[str, ...]:
    return tuple(training(label, _name(column)) for column in columns for label in labels)


@dataclass(frozen=True)
class Numbers:
    """Means over seeds of one experiment."""

    f1: dict[Column, dict[str, float]]
    parts: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # privacy -> method -> largest part first
    known: dict[str, tuple[float, float]] = field(default_factory=dict)  # method -> guessed right, adjusted Rand index

    def columns(self, labels: tuple[str, ...], privacy: str | None = None) -> list[Column]:
        """Where all these methods have a number."""
        return [
            column
            for column, methods in self.f1.items()
            if privacy in (None, column[1]) and all(label in methods for label in labels)
        ]


@dataclass(frozen=True)
class Said:
    """The paper's statements that differ between its two experiments."""

    gains: str
    least_gain: float
    useful: float  # F1 above which a private model knows something of its user; a coin has 0.49
    others: str  # what the paper has for methods that do not
    majority: tuple[str, ...]  # methods that gain by imbalance
    easy: bool  # of MNIST alone: privacy hurts heads of one's own more, rare preferences are served, embeddings alone
    # make no difference, all of them separate; of voices: embeddings help, only prototypes separate


MNIST = Said("12 % to 41 %", 0.115, 0.55, "others at most 0.53", ("Global", "Global+", "PFedKM", "FedEmbed-SOM"), True)
VOICE = Said("15 % to 35 %", 0.14, 0.5, "others below 0.5", ("Global", "Global+", "FedEmbed-SOM"), False)


def claims(numbers: Numbers, said: Said) -> list[Claim]:
    return [*_best(numbers, said), *_private(numbers, said), *_parts(numbers, said), *_ablations(numbers, said),
            *_embeddings(numbers, said)]  # fmt: skip


def table(numbers: Numbers, said: Said, unsettled: Mapping[str, str]) -> list[str]:
    return claims_table(claims(numbers, said), unsettled)


def _best(numbers: Numbers, said: Said) -> Iterator[Claim]:
    """Sections 4.2.1 and 4.3.1: known or prototypical sub-populations are above all baselines."""
    for label in GROUPED:
        columns = numbers.columns((label, *BASELINES))
        if not columns:
            continue
        best = {c: max(BASELINES, key=lambda other: numbers.f1[c][other]) for c in columns}
        gain = {c: numbers.f1[c][label] / numbers.f1[c][best[c]] - 1 for c in columns}
        least = min(columns, key=lambda c: gain[c])
        told = f"{_many([gain[c] > 0 for c in columns])} columns; least: {_signed(gain[least])} on {best[least]}"
        large = gain[least] >= said.least_gain
        yield Claim(f"{label} is above all baselines, with privacy and without", trained((label, *BASELINES), columns),
                    said.gains, f"{told} ({_name(least)})", yes_or_no(min(gain.values()) > 0, large))  # fmt: skip


def _private(numbers: Numbers, said: Said) -> Iterator[Claim]:
    """Under privacy only heads of sub-populations personalize, and heads of one's own lose most."""
    others = (*BASELINES, "FedEmbed-Personal", "FedEmbed-SOM")
    columns = [c for c in numbers.columns((*GROUPED, *others)) if c[1] != "none"]
    if columns:
        grouped = min(numbers.f1[c][label] for c in columns for label in GROUPED)
        top, where = max((numbers.f1[c][label], f"{label} ({_name(c)})") for c in columns for label in others)
        yield Claim(
            "Only heads of sub-populations work under privacy: FedEmbed-Prototype and -Type are above "
            f"{said.useful:g}, no other method is", trained((*GROUPED, *others), columns), said.others,
            f"these at least {grouped:.3f}; {where} {top:.3f}", yes_or_no(grouped > said.useful >= top),
        )  # fmt: skip
    if not said.easy:
        return
    lost: dict[str, list[float]] = {}
    compared: set[Column] = set()
    for users, column in numbers.columns((*GROUPED, *OWN_HEADS)):
        plain = numbers.f1.get((users, "none"), {})
        if column != "none" and all(label in plain for label in (*GROUPED, *OWN_HEADS)):
            compared |= {(users, column), (users, "none")}
            for label in (*GROUPED, *OWN_HEADS):
                lost.setdefault(label, []).append(plain[label] - numbers.f1[users, column][label])
    if lost:
        pairs = zip(*(lost[label] for label in OWN_HEADS)), zip(*(lost[label] for label in GROUPED))
        more = [min(own) > max(grouped) for own, grouped in zip(*pairs)]
        means = ", ".join(f"{label} {sum(values) / len(values):.2f}" for label, values in lost.items())
        yield Claim(
            "Privacy costs heads of one's own (FedRep, PFedMe, FedEmbed-Personal) more F1 than those of groups",
            trained((*OWN_HEADS, *GROUPED), sorted(compared)), "0.21 to 0.27 against 0.11 to 0.19",
            f"{_many(more)} columns; mean loss: {means}", yes_or_no(all(more)),
        )  # fmt: skip


def _parts(numbers: Numbers, said: Said) -> Iterator[Claim]:
    """Tables 4 and 5: who serves the rare sub-populations, and who only the frequent one."""
    for privacy, methods in numbers.parts.items() if said.easy else ():
        if all(label in methods for label in (*GROUPED, *BASELINES)):
            rare = {label: methods[label][-1] for label in (*GROUPED, *BASELINES)}
            best = max(BASELINES, key=lambda label: rare[label])
            yield Claim(
                f"Imbalanced users, {privacy}: the rarest sub-populations are served better by FedEmbed-Prototype and "
                "-Type than by any baseline", trained((*GROUPED, *BASELINES), [("imbalanced", privacy)]), "all",
                f"{rare[GROUPED[0]]:.3f} and {rare[GROUPED[1]]:.3f}; {best} {rare[best]:.3f}",
                yes_or_no(min(rare[label] for label in GROUPED) > rare[best]),
            )  # fmt: skip
    plain = numbers.parts.get("none", {})
    few = [label for label in said.majority if label in plain]
    columns = [column for column in (("balanced", "none"), ("imbalanced", "none")) if column in numbers.f1]
    if few and len(columns) == 2:
        gained = {x: numbers.f1[columns[1]].get(x, 0) - numbers.f1[columns[0]].get(x, 0) for x in few}
        spread = {x: plain[x][0] - plain[x][-1] for x in few}
        told = "; ".join(f"{x} {gained[x]:+.2f}, {spread[x]:+.2f}" for x in few).replace(" -", " −")
        yield Claim(
            f"{', '.join(few)} gain by imbalance, for they fit the most frequent preference", trained(few, columns),
            "all", f"gain, and most frequent less rarest: {told}",
            yes_or_no(all(gained[x] > 0 and spread[x] > 0 for x in few)),
        )  # fmt: skip


def _ablations(numbers: Numbers, said: Said) -> Iterator[Claim]:
    """Section 5: what prototypes, the map and embeddings alone are worth."""
    if columns := numbers.columns(GROUPED):
        gaps = [abs(numbers.f1[c][GROUPED[0]] - numbers.f1[c][GROUPED[1]]) for c in columns]
        near = [gap <= CLOSE for gap in gaps]
        yield Claim(f"FedEmbed-Prototype is often close to FedEmbed-Type (within {CLOSE:.2g}, in most columns)",
                    trained(GROUPED, columns), "3 of 4", f"{_many(near)} columns; at most {max(gaps):.3f} apart",
                    yes_or_no(sum(near) > len(near) / 2))  # fmt: skip
    if columns := numbers.columns(("FedEmbed-SOM", "PFedKM"), "none"):
        pairs = [(numbers.f1[c]["FedEmbed-SOM"], numbers.f1[c]["PFedKM"]) for c in columns]
        told = "; ".join(f"{mine:.3f} against {theirs:.3f}" for mine, theirs in pairs)
        yield Claim("FedEmbed-SOM is above PFedKM (no privacy)", trained(("FedEmbed-SOM", "PFedKM"), columns), "far",
                    told, yes_or_no(all(a > b for a, b in pairs)))  # fmt: skip
    if not (columns := numbers.columns(OWN_HEADS, "none")):
        return
    own = [numbers.f1[c]["FedEmbed-Personal"] for c in columns]
    if not said.easy:
        rest = [max(numbers.f1[c][label] for label in ("FedRep", "PFedMe")) for c in columns]
        told = "; ".join(f"{a:.3f} against {b:.3f}" for a, b in zip(own, rest))
        yield Claim("FedEmbed-Personal is above FedRep and PFedMe (no privacy): embeddings help where the problem is "
                    "hard", trained(OWN_HEADS, columns), "by nearly 20 %", told,
                    yes_or_no(all(a > b for a, b in zip(own, rest))))  # fmt: skip
        return
    fedrep = [numbers.f1[c]["FedRep"] for c in columns]
    told = "; ".join(f"{a:.3f} against {b:.3f}" for a, b in zip(own, fedrep))
    yield Claim(f"Embeddings alone make no difference: FedEmbed-Personal is within {CLOSE:.2g} of FedRep (no privacy)",
                trained(("FedEmbed-Personal", "FedRep"), columns), "0.76 against 0.78", told,
                yes_or_no(all(abs(a - b) <= CLOSE for a, b in zip(own, fedrep))))  # fmt: skip


def _embeddings(numbers: Numbers, said: Said) -> Iterator[Claim]:
    """Figures 3 to 5."""
    known = numbers.known

    def drawn(*labels: str) -> tuple[str, ...]:
        return tuple(training(label, FIGURES) for label in labels)

    if all(label in known for label in EMBEDDED):
        told = ", ".join(f"{label} {100 * known[label][0]:.0f} % ({_index(known[label][1])})" for label in EMBEDDED)
        others = [known[label][0] for label in EMBEDDED if label != "FedEmbed-Prototype"]
        if said.easy:
            yield Claim("Figure 3: embeddings of all variants separate most preferences", drawn(*EMBEDDED),
                        "all of four", f"guessed right (adjusted Rand index): {told}",
                        yes_or_no(min(others) > MOST))  # fmt: skip
        else:
            yield Claim("Figure 5: embeddings of variants without prototypes confuse most preferences",
                        drawn(*EMBEDDED), "all of three", f"guessed right (adjusted Rand index): {told}",
                        yes_or_no(max(others) <= MOST))  # fmt: skip
    if "FedEmbed-Prototype" in known:
        right = known["FedEmbed-Prototype"][0]
        told = f"{100 * right:.1f} %"
        yield Claim("FedEmbed-Prototype recovers preferences perfectly", drawn("FedEmbed-Prototype"), "100 %", told,
                    yes_or_no(right >= WHOLE))  # fmt: skip
    if NO_KINDS in known and "FedEmbed-Type" in known:
        with_kinds, without = known["FedEmbed-Type"][1], known[NO_KINDS][1]
        yield Claim("Figure 4: the head that tells kinds of rows makes embeddings separate",
                    drawn("FedEmbed-Type", NO_KINDS), "visibly",
                    f"adjusted Rand index {_index(with_kinds)} with it, {_index(without)} without",
                    yes_or_no(with_kinds - without >= STRUCTURE))  # fmt: skip


def _many(found: list[bool]) -> str:
    return f"{sum(found)} of {len(found)}"


def _name(column: Column) -> str:
    return ", ".join(column)


def _signed(part: float) -> str:
    return f"{100 * part:+.1f} %".replace("-", "−")


def _index(value: float) -> str:
    return f"{value + 0.0 if abs(value) >= 0.005 else 0.0:.2f}".replace("-", "−")
