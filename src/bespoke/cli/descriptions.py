"""Collects and prints what `bespoke methods`, `data` and `metrics` show; everything is read from the code itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, TypedDict, cast

from rich.markup import escape
from rich.table import Table

from bespoke.errors import unknown
from bespoke.imported import trust_named
from bespoke.plain import ByMethod, Knobs, TomlTable
from bespoke.records import MethodRecord
from bespoke.registry import Registry
from bespoke.terminal import Terminal

Origin = TypedDict("Origin", {"from": str})  # the package that offers it; empty for bespoke's own


class KnobFacts(TypedDict):
    """A knob of a method. Names of a nested dataclass contain a dot."""

    name: str
    default: object
    doc: str
    bounds: dict[str, float]


class MethodFacts(Origin, MethodRecord, total=False):
    """A method; its name alone if another package offers it."""

    knobs: list[KnobFacts]
    kind: str  # "method", or what else another package offers


class CountedTable(TypedDict):
    """What the files of a source hold."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


class SourceFacts(Origin, total=False):
    """A data source; its name alone if another package offers it."""

    name: str
    title: str
    kind: str
    clients: int
    examples: int
    task: str
    group: str
    licence: str
    obtain: str
    module: str
    function: str
    counts: str
    options: Knobs
    statistics: list[CountedTable]


class MetricFacts(Origin, total=False):
    """A metric; its name alone if another package offers it."""

    name: str
    task: str
    better: str
    kind: str


class PresetFacts(TypedDict):
    """A preset, with the methods that it is for."""

    name: str
    title: str
    source: str
    notes: list[str]
    rounds: int | None
    experiment: TomlTable
    knobs: ByMethod
    grid: ByMethod
    best: ByMethod
    entries: ByMethod
    methods: list[str]
    missing: list[str]  # of these, the methods that do not exist here


def describe_methods(name: str | None = None) -> list[MethodFacts]:
    from bespoke.callbacks import CALLBACKS
    from bespoke.federation.cohorts import SAMPLERS
    from bespoke.methods import METHODS
    from bespoke.methods.parts.server_optimizer import OPTIMIZERS
    from bespoke.study.described import describe
    from bespoke.study.plan import NO_TASK

    if name is not None:
        trust_named(name)
        method = METHODS.find(name, "bespoke methods")
        own = METHODS.recorded(name, "bespoke methods")
        comes_from = "" if own in METHODS.built_in else own
        return [
            {**describe(method(NO_TASK)), "knobs": knobs(method), "from": comes_from, "kind": METHODS.kind}
        ]  # as it is by default
    found = METHODS.built_in.values()
    built_in: list[MethodFacts] = [
        {**describe(method(NO_TASK)), "knobs": knobs(method), "from": "", "kind": METHODS.kind} for method in found
    ]
    for registry in (METHODS, OPTIMIZERS, SAMPLERS, CALLBACKS):  # no command of their own lists the last three
        built_in += [{"name": name, "from": origin, "kind": registry.kind} for name, origin in _others(registry)]
    return built_in


def _others(registry: Registry[Any]) -> list[tuple[str, str]]:
    """The names that other packages offer, with their origin. More detail would require importing them."""
    return [(name, origin) for name, origin in registry.origins().items() if origin]


def _print_others(found: Sequence[MethodFacts | SourceFacts | MetricFacts], console: Terminal) -> None:
    for entry in found:
        if entry["from"]:
            kind = f"{entry['kind']} " if entry.get("kind", "method") != "method" else ""
            console.print(f"{kind}{escape(entry['name'])}  from {escape(entry['from'])}", highlight=False)


def knobs(kind: type) -> list[KnobFacts]:
    """A dataclass's knobs."""
    found: list[KnobFacts] = []
    for entry in fields(kind):
        if entry.name == "task" or not entry.init:
            continue
        made = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if is_dataclass(made):
            inner = knobs(type(made))
            found += [{**knob, "name": f"{entry.name}.{knob['name']}"} for knob in inner]
        else:
            default = list(made) if isinstance(made, tuple) else made
            bounds = {str(k): v for k, v in entry.metadata.get("bounds", {}).items()}
            found.append(
                {"name": entry.name, "default": default, "doc": entry.metadata.get("doc", ""), "bounds": bounds}
            )
    return found


def print_methods(found: list[MethodFacts]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "what it does", "a client ends up with", "the server learns"):
        table.add_column(column, overflow="fold")
    for method in found:
        if not method["from"]:
            table.add_row(method["name"], method["summary"], method["personal"], learned(method))
    console = Terminal()
    console.print(table)
    _print_others(found, console)
    console.print("\n`bespoke methods NAME` describes one method in full, with its settings.", highlight=False)


def learned(method: MethodFacts) -> str:
    """What the server learns, derived from the fields that leave a client."""
    sums = "each group's sums of" if method["by_group"] else "sums of"
    kinds = {"EACH": "every client's", "SUM": sums, "COUNT": "a count of clients by"}
    found = {kind: [name for name, reveal in method["reveals"].items() if reveal == kind] for kind in kinds}
    nothing = f"nothing more than of {method['after']} before it" if method["after"] else "nothing"
    return "; ".join(f"{kinds[kind]} {', '.join(names)}" for kind, names in found.items() if names) or nothing


def hidden(method: MethodFacts) -> str:
    """How [privacy] can protect the method's messages."""
    each = [name for name, reveal in method["reveals"].items() if reveal == "EACH"]
    if not method["reveals"]:
        return f"as {method['after']} before it" if method["after"] else "nothing to hide: epsilon is 0"
    if each:
        fields = ", ".join(each)
        return f"needs local_noise, because the server sees every client's {fields}; noise on sums: epsilon is infinite"
    where = "each group's sum" if method["by_group"] else "the sum"
    return f"noise on {where}, on the client, or both"


def hardened(method: MethodFacts) -> str:
    """How [robust] can protect the method, and what the server must see for it."""
    if not method["changes"]:
        sends = f"sends no change of a shared model ({', '.join(method['reveals'])})" if method["reveals"] else ""
        return f"refused: the method {sends}" if sends else "nothing to do: the method itself sends nothing"
    fields = ", ".join(method["changes"])
    if any(method["reveals"][name] == "EACH" for name in method["changes"]):
        return f"multi-krum; norm-bound: the server sees every client's {fields} anyway"
    others = any(kind != "COUNT" and name not in method["changes"] for name, kind in method["reveals"].items())
    besides = ", and the norms of the other fields; all changes have the same weight" if others else ""
    return (
        f"median, trimmed-mean, krum, multi-krum: the server sees every client's {fields}; norm-bound: sums and "
        f"every client's norms; geometric-median: it sees sums{besides}"
    )


def aggregated(method: MethodFacts) -> str:
    """The possible values of a stage's `aggregator`."""
    from bespoke.messages.robust.aggregator import Aggregator, ZeroAndClip

    if not method["changes"]:
        return "refused, as under [robust]" if method["reveals"] else "nothing to do: the method itself sends nothing"
    added = ", ".join(ZeroAndClip().reveals)
    return f"{knobs(Aggregator)[0]['doc']}; with tff-robust, sums of {added} also leave the clients"


def print_method(method: MethodFacts) -> None:
    console = Terminal()
    console.print(f"[bold]{method['name']}[/bold]  {method['summary']}", highlight=False)
    console.print(f"[dim]{method['paper']}[/dim]\n", highlight=False)
    lines = {
        **({"comes from": method["from"]} if method["from"] else {}),
        "sent to clients": "; ".join(f"{name}: {text}" for name, text in method["down"].items()) or "nothing",
        "leaves a client": "; ".join(f"{name}: {text}" for name, text in method["travels"].items()) or "nothing",
        "the server learns": learned(method),
        "under \\[privacy]": hidden(method),
        "under \\[robust]": hardened(method),
        "aggregator": aggregated(method),
        "stays private": "; ".join(f"{name}: {text}" for name, text in method["private"].items())
        or "the data; no other state",
        "personal model": method["personal"],
        "unseen clients": method["unseen"],
    }
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in lines.items():
        facts.add_row(name, escape(text))
    console.print(facts)
    table = Table(
        title="\nknobs", title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    for column in ("name", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for knob in method["knobs"]:
        table.add_row(knob["name"], escape(str(knob["default"])), escape(knob["doc"]))
    console.print(table)


def describe_sources(name: str | None = None) -> list[SourceFacts]:
    from bespoke.data.partition import PARTITIONERS
    from bespoke.data.sources.registry import SOURCES, Source, source_options, source_statistics

    def source_facts(source: Source, comes_from: str) -> SourceFacts:
        facts = {entry.name: getattr(source, entry.name) for entry in fields(source) if entry.name != "loader"}
        return cast(SourceFacts, {**facts, "from": comes_from})

    if name is None:
        built_in = [source_facts(source, "") for source in SOURCES.built_in.values()]
        offered: list[SourceFacts] = [{"name": name, "from": origin} for name, origin in _others(SOURCES)]
        return (
            built_in
            + offered
            + [{"name": name, "from": origin, "kind": PARTITIONERS.kind} for name, origin in _others(PARTITIONERS)]
        )
    if not SOURCES.knows(name):
        raise unknown("data source", name, SOURCES.origins())
    trust_named(name)
    own = SOURCES.recorded(name, "bespoke data")
    described = source_facts(SOURCES.find(own, "bespoke data"), "" if own in SOURCES.built_in else own)
    counted = [cast(CountedTable, asdict(table)) for table in source_statistics(own)]
    return [{**described, "options": source_options(own), "statistics": counted}]


def print_sources(found: list[SourceFacts]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("data", "what", "clients", "examples", "kind"):
        table.add_column(column, overflow="fold", justify="right" if column in ("clients", "examples") else "left")
    for source in found:
        if not source["from"]:
            table.add_row(
                source["name"], source["title"], _count(source["clients"]), _count(source["examples"]), source["kind"]
            )
    console = Terminal()
    console.print(table)
    _print_others(found, console)
    console.print(
        "\n`bespoke data NAME` shows the licence and how to obtain the data; your own tables: `bespoke compare "
        "TABLE.csv --client COLUMN --target COLUMN`.",
        highlight=False,
    )


def print_source(source: SourceFacts) -> None:
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    known = ("task", "clients", "examples", "group", "licence", "obtain") if not source["from"] else ("from",)
    said: Mapping[str, object] = source
    for name in ("name", "title", *known):
        facts.add_row(name, escape(_count(said[name])) or "-")
    options = ", ".join(f"{name} = {value!r}" for name, value in source["options"].items())
    facts.add_row("options", escape(options) or "-")
    console = Terminal()
    console.print(facts)
    for counted in source["statistics"]:
        table = Table(title=f"\n{escape(counted['title'])}", title_justify="left", box=None, pad_edge=False)
        for place, column in enumerate(counted["columns"]):
            table.add_column(column, overflow="fold", justify="right" if place else "left")
        for row in counted["rows"]:
            table.add_row(*(escape(_count(cell)) for cell in row))
        console.print(table)


def describe_metrics() -> list[MetricFacts]:
    from bespoke.models.language import LanguageModel
    from bespoke.models.own_metric import METRICS
    from bespoke.models.task import BaseTask, Classification, Regression

    tasks: dict[str, type[BaseTask]] = {
        "regression": Regression, "classification": Classification, "language": LanguageModel,
    }  # fmt: skip
    built_in: list[MetricFacts] = [
        {"name": name, "task": task, "better": "lower" if name in kind.lower_is_better else "higher", "from": ""}
        for task, kind in tasks.items()
        for name in kind.metrics
    ]
    return built_in + [{"name": name, "from": origin} for name, origin in _others(METRICS)]


def print_metrics(found: list[MetricFacts]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("metric", "task", "better"):
        table.add_column(column)
    for metric in found:
        if not metric["from"]:
            table.add_row(metric["name"], metric["task"], metric["better"])
    console = Terminal()
    console.print(table)
    _print_others(found, console)


def describe_presets() -> list[PresetFacts]:
    from bespoke.experiment.presets import Preset, names
    from bespoke.methods import METHODS

    found = [Preset.read(name) for name in names()]
    missing = {preset.name: [m for m in preset.methods() if m not in METHODS] for preset in found}
    return [
        cast(PresetFacts, {**asdict(preset), "methods": preset.methods(), "missing": missing[preset.name]})
        for preset in found
    ]


def print_presets(found: list[PresetFacts]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("preset", "what", "methods"):
        table.add_column(column, overflow="fold")
    for preset in found:
        what = "\n".join([preset["title"], *(f"- {note}" for note in preset["notes"])])
        table.add_row(preset["name"], escape(what), ", ".join([*preset["methods"], *preset["entries"]]))
    console = Terminal()
    console.print(table)
    console.print(
        '\n`bespoke tune EXPERIMENT.toml --preset NAME` tries the grid of a preset. preset = "NAME" in [compare] does '
        "so in a comparison, or, with tune = false, uses the best values.",
        highlight=False,
        markup=False,
    )


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
