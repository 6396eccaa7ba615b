"""The command line. Heavy imports happen inside the commands, so that --help is instant."""

from __future__ import annotations

from bespoke.cli import (  # noqa: F401 -- commands, in the order of --help
    compare,
    deploy,
    deploy_run,
    experiments,
    generate,
    listings,
    models,
    personal,
    report,
    rescore,
    studio,
)
from bespoke.cli.app import app
from bespoke.cli.exit_codes import program


def main() -> None:
    """Entry point."""
    program(lambda: app(standalone_mode=False))
