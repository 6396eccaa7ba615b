"""The files that people of a federation write: hub.toml of the hub, site.toml of a site. Unknown keys are refused."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from bespoke.errors import UserError
from bespoke.experiment.typed import explain

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$"  # of projects, sites and organizations: also names of files and certificates
HOST = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?$"
FINGERPRINT = r"^[0-9a-f]{64}$"
ALLOWED = {
    NAME: "up to 40 letters, digits, - and _, the first a letter or a digit",
    HOST: "the name or the number of a machine, such as hub.example.org",
    FINGERPRINT: "64 digits of 0-9 and a-f, as you were told by telephone",
}
RESERVED = ("server", "all", "@all", "admin", "client")  # FLARE means something else by them

TRUTHS = ("yes", "true", "t", "y", "no", "false", "f", "n")


def _plain(name: str) -> str:
    """Refuses names that FLARE takes for a number or a truth value on the command line of its programs."""
    try:
        float(name)
    except ValueError:
        if name.lower() not in TRUTHS:
            return name
    raise ValueError(f"{name!r} is no name for FLARE, which reads it as a number or as yes or no; choose another one")


Name = Annotated[str, StringConstraints(pattern=NAME), AfterValidator(_plain)]
Fingerprint = Annotated[str, StringConstraints(pattern=FINGERPRINT)]
Port = Annotated[int, Field(ge=1, le=65535)]


Settings = TypeVar("Settings", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Columns(_Strict):
    """Which columns of a site's table are what. The sites' tables have the same columns."""

    client: str = Field(description="the client column (several: joined by commas)")
    target: str | None = Field(default=None, description="the target column; default: the schema's target")
    group: str | None = Field(default=None, description="the group column")
    features: list[str] | None = Field(default=None, description="the feature columns; default: the schema's")
    time: str | None = Field(default=None, description="the time column, for splits by time")


class Hub(_Strict):
    """hub.toml."""

    name: Name = Field(description="the project's name")
    server: str = Field(pattern=HOST, description="the name of the hub's machine, as sites reach it")
    port: Port = Field(default=8002, description="the only port that the hub opens")
    org: Name = Field(default="hub", description="the hub's organization")
    sites: list[Name] = Field(min_length=1, description="the sites of the project, and no others")
    schema_file: str | None = Field(default=None, alias="schema", description="the agreed schema of the sites' tables")
    columns: Columns | None = Field(default=None, description="which columns of the tables are what")
    min_sites: int = Field(default=2, ge=1, description="with fewer sites a run waits")
    least: int = Field(default=3, ge=1, description="least number of clients in a sum; a site may ask for more")
    days: int = Field(default=365, ge=1, le=3650, description="days that certificates are valid")

    @model_validator(mode="after")
    def _together(self) -> Hub:
        if twice := [name for name, count in Counter(name.lower() for name in self.sites).items() if count > 1]:
            raise ValueError(f"the site {twice[0]!r} stands in sites twice")
        for name in self.sites:
            if name.lower() in (*RESERVED, self.server.lower()):
                raise ValueError(f"sites: {name!r} is the name of something else; choose another one")
        if self.min_sites > len(self.sites):
            raise ValueError(f"min_sites = {self.min_sites} is more than the {len(self.sites)} sites")
        if self.schema_file is not None and self.columns is None:
            raise ValueError("schema needs a table [columns] with client = ..., the client column of the tables")
        return self


class SiteSettings(_Strict):
    """site.toml: what the hub says of itself (project, server, port, fingerprint), and what the site decides."""

    name: Name = Field(description="this site's name, as it stands in the hub's list")
    org: Name = Field(description="this site's organization")
    project: Name = Field(description="the project's name")
    server: str = Field(pattern=HOST, description="the hub's machine")
    port: Port = Field(default=8002, description="the hub's port")
    fingerprint: str = Field(
        pattern=FINGERPRINT, description="of the hub's authority; compare it with what the hub says by telephone"
    )
    least: int = Field(default=3, ge=1, description="least number of clients in a sum that leaves this site")
    epsilon: float | None = Field(default=None, gt=0, description="this site's own privacy budget; default: none")
    delta: float | None = Field(default=None, gt=0, lt=1, description="of the budget")
    methods: list[str] | None = Field(default=None, description="methods that may run here; default: all built-in ones")
    share_clients: bool = Field(default=False, description="scores of single clients may leave this site")
    models: list[str] | None = Field(
        default=None, description="networks that are installed here and may be trained, as 'package.module:name'"
    )
    peers: dict[Name, Fingerprint] | None = Field(
        default=None, description="the fingerprints of the other sites' keys, as they say by telephone; default: the "
        "first that is heard of a site counts",
    )  # fmt: skip

    @model_validator(mode="after")
    def _together(self) -> SiteSettings:
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("epsilon and delta go together: give both or none")
        return self


def read_hub(path: Path) -> Hub:
    """Reads hub.toml."""
    return _read(path, Hub)


def read_site(path: Path) -> SiteSettings:
    """Reads site.toml."""
    return _read(path, SiteSettings)


def _read(path: Path, kind: type[Settings]) -> Settings:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; docs/deploy.md shows one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a TOML file ({error})") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    return check(found, kind, str(path))


def check(found: Any, kind: type[Settings], where: str) -> Settings:
    """The settings as typed values, or what is wrong with them in words."""
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "value_error":  # of _plain and _together
            raise UserError(f"{where}: {key}{': ' if key else ''}{first['ctx']['error']}") from None
        if first["type"] == "string_pattern_mismatch":
            allowed = ALLOWED[first["ctx"]["pattern"]]
            raise UserError(f"{where}: {key} = {first['input']!r}: it has to be {allowed}") from None
        raise explain(error, kind, where) from None


def is_name(text: str) -> bool:
    """Whether a text can be the name of a site."""
    try:
        return bool(re.fullmatch(NAME, text) and _plain(text))
    except ValueError:
        return False
