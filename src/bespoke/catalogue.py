"""What `bespoke methods` and `bespoke data` show: read off the code, so that it cannot differ from it."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from bespoke.errors import unknown
from bespoke.terminal import Terminal


def describe_methods(name: str | None = None) -> list[dict[str, Any]]:
    from bespoke.comparison import NO_TASK
    from bespoke.described import describe
    from bespoke.methods import METHODS

    if name is not None and name not in METHODS:
        raise unknown("method", name, METHODS)
    chosen = [METHODS[name]] if name else METHODS.values()
    return [{**describe(method(NO_TASK)), "knobs": knobs(method)} for method in chosen]  # as it is by default


def knobs(kind: type) -> list[dict[str, Any]]:
    """A dataclass's knobs: name, default, meaning, bounds; those of a nested dataclass with a dot."""
    found: list[dict[str, Any]] = []
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


def print_methods(found: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "what it does", "a client ends up with", "the server learns"):
        table.add_column(column, overflow="fold")
    for method in found:
        table.add_row(method["name"], method["summary"], method["personal"], learned(method))
    console = Terminal()
    console.print(table)
    console.print("\n`bespoke methods NAME` shows one in full, with its knobs.", highlight=False)


def learned(method: dict[str, Any]) -> str:
    """What the server learns, read off the fields that leave a client."""
    sums = "each group's sums of" if method["by_group"] else "sums of"
    kinds = {"EACH": "every client's", "SUM": sums, "COUNT": "a count of clients by"}
    found = {kind: [name for name, reveal in method["reveals"].items() if reveal == kind] for kind in kinds}
    nothing = f"nothing more than of {method['after']} before it" if method["after"] else "nothing"
    return "; ".join(f"{kinds[kind]} {', '.join(names)}" for kind, names in found.items() if names) or nothing


def hidden(method: dict[str, Any]) -> str:
    """What [privacy] can do about it."""
    each = [name for name, reveal in method["reveals"].items() if reveal == "EACH"]
    if not method["reveals"]:
        return f"as {method['after']} before it" if method["after"] else "nothing to hide: epsilon is 0"
    if each:
        return (
            f"needs local_noise, for {', '.join(each)} of every client is seen; with noise on sums epsilon is infinite"
        )
    where = "each group's sum" if method["by_group"] else "the sum"
    return f"noise on {where}, on the client, or both"


def hardened(method: dict[str, Any]) -> str:
    """What [robust] can do about bad clients, and what the server has to see for it."""
    if not method["changes"]:
        sends = f"sends no change of a shared model ({', '.join(method['reveals'])})" if method["reveals"] else ""
        return f"refused: it {sends}" if sends else "nothing to do: it sends nothing itself"
    fields = ", ".join(method["changes"])
    if any(method["reveals"][name] == "EACH" for name in method["changes"]):
        return f"multi-krum; norm-bound: every client's {fields} is seen anyway"
    others = any(kind != "COUNT" and name not in method["changes"] for name, kind in method["reveals"].items())
    besides = ", and norms of what is no change; all changes count alike" if others else ""
    return (
        f"median, trimmed-mean, krum, multi-krum: every client's {fields} is seen; norm-bound: sums and every client's "
        f"norms; geometric-median: sums{besides}"
    )


def aggregated(method: dict[str, Any]) -> str:
    """What the key `aggregator` of a stage may be."""
    from bespoke.robust.aggregator import Aggregator, ZeroAndClip

    if not method["changes"]:
        return "refused, as under [robust]" if method["reveals"] else "nothing to do: it sends nothing itself"
    added = ", ".join(ZeroAndClip().reveals)
    return f"{knobs(Aggregator)[0]['doc']}, for which sums of {added} leave clients too"


def print_method(method: dict[str, Any]) -> None:
    console = Terminal()
    console.print(f"[bold]{method['name']}[/bold]  {method['summary']}", highlight=False)
    console.print(f"[dim]{method['paper']}[/dim]\n", highlight=False)
    lines = {
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


def describe_sources(name: str | None = None) -> list[dict[str, Any]]:
    from bespoke.data.sources import SOURCES, source_options, source_statistics

    if name is None:
        return [asdict(source) for source in SOURCES.values()]
    if name not in SOURCES:
        raise unknown("data source", name, SOURCES)
    counted = [asdict(table) for table in source_statistics(name)]
    return [{**asdict(SOURCES[name]), "options": source_options(name), "statistics": counted}]


def print_sources(found: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("data", "what", "clients", "examples", "kind"):
        table.add_column(column, overflow="fold", justify="right" if column in ("clients", "examples") else "left")
    for source in found:
        table.add_row(
            source["name"], source["title"], _count(source["clients"]), _count(source["examples"]), source["kind"]
        )
    console = Terminal()
    console.print(table)
    console.print(
        "\n`bespoke data NAME` shows licence and how to obtain it; your own tables: `bespoke compare TABLE.csv "
        "--client COLUMN --target COLUMN`.",
        highlight=False,
    )


def print_source(source: dict[str, Any]) -> None:
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name in ("name", "title", "task", "clients", "examples", "group", "licence", "obtain"):
        facts.add_row(name, escape(_count(source[name])) or "-")
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


def describe_presets() -> list[dict[str, Any]]:
    from bespoke.methods import METHODS
    from bespoke.presets import Preset, names

    found = [Preset.read(name) for name in names()]
    return [
        {**asdict(preset), "methods": preset.methods(), "missing": [m for m in preset.methods() if m not in METHODS]}
        for preset in found
    ]


def print_presets(found: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("preset", "what", "methods"):
        table.add_column(column, overflow="fold")
    for preset in found:
        what = "\n".join([preset["title"], *(f"- {note}" for note in preset["notes"])])
        table.add_row(preset["name"], escape(what), ", ".join([*preset["methods"], *preset["entries"]]))
    console = Terminal()
    console.print(table)
    console.print(
        '\n`bespoke tune EXPERIMENT.toml --preset NAME` tries its grid; preset = "NAME" in [compare] compares with it, '
        "and with tune = false uses its best values.",
        highlight=False,
        markup=False,
    )


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
