"""bespoke models"""

from __future__ import annotations

from typing import Annotated

import typer

from bespoke.cli.app import Json, app
from bespoke.cli.say import print_json
from bespoke.errors import UserError, unknown


@app.command()
def models(
    action: Annotated[
        str | None, typer.Argument(metavar="get", help="Take a model; without it they are listed.")
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which one.")] = None,
    as_json: Json = False,
) -> None:
    """List pretrained language models that can be had by name, or take one into the user's cache.

    `bespoke models`, then `bespoke models get smollm2`, and in an experiment `[model] name = "frozen"`,
    `pretrained = "smollm2"`

    Any other causal language model is named by its folder, its GGUF file or its name on the Hugging Face hub.
    """
    from bespoke.pretrained import at_hand, get

    if action is not None:
        if action != "get":
            raise unknown("action", action, ["get"], "bespoke models")
        if name is None:
            raise UserError(f"bespoke models get NAME: one of {', '.join(entry['name'] for entry in at_hand())}")
        get(name)
    found = [entry for entry in at_hand() if name in (None, entry["name"])]
    if as_json:
        print_json(found if name is None else found[0])
        return
    for entry in found:
        print(
            f"{entry['name']}: {entry['about']}\n  {entry['path'] or 'not here; bespoke models get ' + entry['name']}"
        )
