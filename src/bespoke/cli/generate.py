"""The command `bespoke generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bespoke.cli.app import Json, NameClients, app
from bespoke.cli.console import print_error, print_json

if TYPE_CHECKING:
    from bespoke.generation.generate import Line, Piece

Method = Annotated[str | None, typer.Option(metavar="NAME", help="Which method's run, in a comparison folder.")]


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run with a frozen language model, or a comparison.")],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="The beginning of each text.")
    ] = None,
    users: Annotated[
        list[str] | None,
        typer.Option(
            "--user", metavar="ID", help="The user whose style is used (repeatable; default: the shared model)."
        ),
    ] = None,
    contexts: Annotated[
        list[str] | None,
        typer.Option(
            "--context", metavar="NAME", help="The context of the text (repeatable; default: the user's own)."
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", metavar="", help="Also write with the frozen model without a prefix.")
    ] = False,
    method: Method = None,
    number: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Number of texts per prompt and voice.")
    ] = 1,
    length: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of tokens per text.")] = 30,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(metavar="K", help="Sample from the K most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="The random seed of the texts.")] = 0,
    name_clients: NameClients = False,
    as_json: Json = False,
) -> None:
    """Write texts in the style of users and contexts, with the personal models of a run.

    `bespoke generate runs/fedpc --user arya --context friends --context thrones "We must" "I think"`

    A part of a name is enough if it is unique. The same seed gives the same texts.
    """
    from bespoke.generation.generate import Drawing, finished, lines_of, write
    from bespoke.generation.voices import Voices, chosen_run

    how = Drawing(temperature, top_k, top_p)
    voices = Voices(chosen_run(run, method), name_clients)
    lines = lines_of(voices.chosen(users or [], contexts or [], plain), prompts or [""], number)
    pieces = write(voices, lines, how, length, seed)
    if as_json:
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "length": length}
        about = {"run": str(voices.path), "method": voices.experiment.label, "pretrained": voices.pretrained}
        print_json({**about, "settings": settings, "texts": finished(lines, pieces)})
        return
    if contexts and all(voice.prefix is not None and len(voice.personal["prefix"]) == 1
                        for voice in (line.voice for line in lines)):  # fmt: skip
        print_error(f"bespoke: {voices.experiment.label} has one prefix for all contexts: --context changes nothing")
    _show(lines, pieces)


def _show(lines: list[Line], pieces: Iterator[Piece]) -> None:
    """Prints lines while they are written; without a terminal, prints each line when it is finished."""
    from rich.live import Live
    from rich.text import Text

    from bespoke.terminal import Terminal

    console, texts = Terminal(highlight=False), [""] * len(lines)

    def page() -> Any:
        found, prompt = Text(), None
        for line, text in zip(lines, texts):
            if line.prompt != prompt:
                prompt = line.prompt
                found.append(f"{prompt or '(no prompt)'}\n", style="bold")
            if line.number == 0:
                found.append(f"  {line.voice.label}\n", style="cyan")
            found.append(f"    {prompt}{text}\n".replace("\n", " ").rstrip() + "\n")
        found.rstrip()
        return found

    if not console.is_terminal:
        for piece in pieces:
            texts[piece.line] += piece.text
        console.print(page(), soft_wrap=True)
        return
    with Live(page(), console=console, auto_refresh=False) as live:
        for piece in pieces:
            texts[piece.line] += piece.text
            live.update(page(), refresh=True)
