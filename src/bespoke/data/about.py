"""The types of `Population.about`: what a population says about itself, written as JSON into population.json.

A source fills in what it knows, an encoding what it learned, `standardize` what it scaled. A key that is not there does
not apply: a table has no `side`, texts without contexts no `contexts`. `describe` in data/sources/registry.py has the
keys that every source sets.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NotRequired, TypedDict, cast

from bespoke.plain import JsonObject, TomlTable

TaskName = Literal["regression", "classification", "language"]
ColumnKind = Literal["number", "boolean", "category", "date", "text"]
Input = Literal["table", "image", "tokens", "spectrogram", "named"]


class Standardized(TypedDict):
    """The default of `standardize` if the experiment sets nothing."""

    features: Literal["global", "client", "none"]
    target: bool


class Topics(TypedDict):
    """Groups of clients by topic, which are found after the split (data/sources/formats/topics.py)."""

    clusters: int
    seed: int


class TextRule(TypedDict, total=False):
    """How a text becomes tokens."""

    column: str  # of a table
    tokenizer: str
    pretrained: str  # of tokenizer "model": the language model whose tokenizer it is
    lower: bool
    length: int  # tokens of a row at most
    shortest: int  # tokens of a text that is kept, at least
    vocabulary: int  # words at most
    least: int  # occurrences of a word in the training rows
    end: bool  # whether an end token follows a whole text
    unknown: list[str]  # words that never get into the vocabulary


class WeighedWords(TextRule, total=False):
    """The text column of a table as TF-IDF features."""

    words: list[str]
    weights: list[float]


class RawColumn(TypedDict):
    """A column of a table that is not yet encoded."""

    name: str
    kind: ColumnKind
    levels: NotRequired[list[str]]  # the texts of a category


class RoleFacts(TypedDict, total=False):
    """Clients' roles (training, validation, test), if the source publishes them."""

    roles: dict[str, int]  # how many
    role: str  # what the column `role` means


class About(RoleFacts, total=False):
    """The keys of `Population.about`."""

    # -- every source -----------------------------------------------------------------------------------------------
    name: str
    title: str
    task: TaskName
    input: Input  # the kind of rows; "table" if it is not said
    licence: str
    notes: list[str]  # what was inferred, left out, dropped or merged, for the user
    features: list[str]  # names, one for each column of x (of each pixel, token, ...)
    numeric: list[bool]  # which features are numbers: these are standardized
    target: str
    standardize: Standardized
    model: TomlTable  # the model of the source's own paper: its name and options of [model]
    metric: str  # the metric if the experiment does not name one

    # -- rows of one kind -------------------------------------------------------------------------------------------
    classes: list[str]  # classification: the names of the values of y
    inputs: list[str]  # rows of several inputs: their names; x holds the first, columns of these names the others
    kinds: list[str]  # names of the values of the column `kind`
    missing: bool  # tables: whether x has missing values
    factor: float  # regression: of the squared error in the loss; 0.5 if it is not said
    side: int  # square images: height and width
    height: int  # other images: lines of a channel
    width: int  # other images: columns
    channels: int  # images; 1 if it is not said
    frames: int  # spectrograms
    bands: int  # spectrograms
    vocabulary: int  # tokens: how many there are
    words: list[str]  # tokens: the known words, without padding, unknown, begin and end
    unscored: list[int]  # tokens that accuracy leaves out
    characters: bool  # whether the column `characters` is there, which bits per character need
    vectors: str  # sent140: the digest of the words' vectors
    dimension: int  # sent140: of the vectors
    pretrained: str  # the language model whose tokens the rows hold
    tokenizer: str
    text: TextRule
    contexts: list[str]  # names of the values of the column `context`
    context: str  # what one context is called
    topics: Topics  # groups that are asked for; gone once they are found

    # -- a user's table or texts before they are encoded (data/tables, data/texts) -----------------------------------
    columns: list[RawColumn]
    levels: list[str] | None  # the target's classes; None in a regression
    file: str
    aside: str  # the columns that are no features
    schema: JsonObject  # what the user declared
    pieces: list[str]  # all distinct words as they are written; word i has the id i + 1
    declared: list[str]  # the vocabulary, if the user declared it
    public: list[str]  # a vocabulary that is known without the data: all pieces of a public tokenizer

    # -- what was learned of the data ----------------------------------------------------------------------------------
    tfidf: WeighedWords
    learned: str  # what the source learned from clients without noise, in words
    unpaid: list[str]  # what was learned from clients without noise and is not declared public
    release: JsonObject  # what was released with noise (privacy/release.py)
    statistics_floats: int  # numbers that each client sends for the statistics
    asked_floats: int  # of these, what a federation asked for before there was a run
    unit: float  # of a standardized target: y_original = y * unit + centre
    centre: float


def plane(about: About) -> tuple[int, int]:
    """Height and width of images."""
    return (about["height"], about["width"]) if "height" in about else (about["side"], about["side"])


def without(about: About, names: Collection[str]) -> About:
    """The same without these keys."""
    return cast(About, {name: value for name, value in about.items() if name not in names})
