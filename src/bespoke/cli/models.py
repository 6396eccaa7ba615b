"""The command `bespoke models`."""

from __future__ import annotations

from typing import Annotated

import typer

from bespoke.cli.app import Json, app
from bespoke.cli.console import print_json
from bespoke.errors import UserError, unknown


@app.command()
def models(
    action: Annotated[
        str | None,
        typer.Argument(
            metavar="get", help="Download a pretrained model. Without this word, the command lists the models."
        ),
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The name of the model.")] = None,
    as_json: Json = False,
) -> None:
    """List networks, losses and pretrained language models, or store a pretrained model in the user's cache.

    `bespoke models` lists the names for `[model] name = "mlp"` and `--model mlp`, and the losses of
    installed packages for `loss = ` in `[model]` and `--loss`.

    `bespoke models get smollm2` downloads a model. An experiment uses it with `[model] name = "frozen"`, `pretrained =
    "smollm2"`.

    Any other causal language model is named by its folder, its GGUF file or its name on the Hugging Face hub.
    """
    from bespoke.pretrained import at_hand, get

    if action is not None:
        if action != "get":
            raise unknown("action", action, ["get"], "bespoke models")
        if name is None:
            raise UserError(f"bespoke models get NAME: one of {', '.join(entry['name'] for entry in at_hand())}")
        get(name)
    found = [{**entry, "kind": "pretrained"} for entry in at_hand() if name in (None, entry["name"])]
    networks, losses = (_networks(), _losses()) if name is None else ([], [])
    if as_json:
        print_json([*networks, *losses, *found] if name is None else found[0])
        return
    for entry in networks:
        print(f"{entry['name']}: {entry['about']}")
    if losses:
        print("\nLosses:")
    for entry in losses:
        print(f"{entry['name']}: {entry['about']}")
    if networks:
        print("\nPretrained:")
    for entry in found:
        print(
            f"{entry['name']}: {entry['about']}\n  {entry['path'] or 'not here; bespoke models get ' + entry['name']}"
        )


def _networks() -> list[dict[str, str]]:
    """The networks of bespoke, and those that installed packages offer."""
    from bespoke.models import MODELS, OFFERED

    built_in = [{"name": name, "about": about, "kind": "network"} for name, about in MODELS.items()]
    others = [
        {"name": name, "about": f"from {origin}", "kind": "network"} for name, origin in OFFERED.origins().items()
    ]
    return built_in + [entry for entry in others if entry["name"] not in MODELS]


def _losses() -> list[dict[str, str]]:
    """The losses that installed packages offer; without one a model has that of its task."""
    from bespoke.models.own_loss import LOSSES

    return [{"name": name, "about": f"from {origin}", "kind": "loss"} for name, origin in LOSSES.origins().items()]
