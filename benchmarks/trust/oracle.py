"""The oracle: fits that share only their rows with bespoke.

bespoke reads and splits a table, so that both have the same train, validation and test rows of a seed. Everything else
is numpy, scikit-learn and statsmodels. Every fit uses only the training rows. Its settings (a penalty, a number of
trees) are chosen by the mean over clients of its loss on the validation rows, as in bespoke.

    constant          the mean, or the frequencies of the classes, of all training rows
    pooled            one ridge or softmax regression
    local             one per client, pulled to the constant; slopes and intercept have separate penalties
    shrunken          one per client, pulled to the pooled fit; slopes and intercept have separate penalties
    mixed-intercept   statsmodels: a random intercept for each client (regression: REML; two classes: variational Bayes)
    mixed-slopes      statsmodels: every coefficient random, independent of the others (regression, REML); used as it is
                      where the optimizer stops, which is often at a variance of zero
    trees             scikit-learn's boosted trees on all rows
    trees-client      the same, with the client's mean target as a feature (scikit-learn's TargetEncoder)
"""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from benchmarks.trust.linear import Padded, Sums, probabilities
from benchmarks.trust.tables import Table
from numpy.typing import NDArray

from bespoke.data.splits import Rows, cross_silo
from bespoke.data.tables.table import read_table
from bespoke.experiment.config import SplitConfig
from bespoke.storage import write_text

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SEEDS = (0, 1, 2)  # as `bespoke compare` has them
PERSONAL = ("local", "shrunken", "mixed-intercept", "mixed-slopes")
LINEAR = ("pooled", *PERSONAL)
RIDGE = 10.0 ** np.arange(-8, 5)  # wide: a feature may vary a thousand times less at one client than at another
SOFTMAX = 10.0 ** np.arange(-4, 5)
INTERCEPT = 10.0 ** np.arange(-6, 4, 2)
MOST_SLOPES = 12  # features up to which all coefficients are random
SECONDS = 10  # of computing, for one fit of statsmodels
OPTIMIZERS = ("lbfgs", "powell")  # the second where the first fails, or ends where all variances are zero


@dataclass(frozen=True)
class Part:
    """Some rows: x with a first column of ones, y, and whose they are."""

    x: Floats
    y: NDArray[Any]
    client: Ints


@dataclass
class Split:
    """One table with one seed; features and target are scaled by the training rows."""

    train: Part
    validation: Part
    test: Part
    clients: list[str]
    classes: int  # 0: regression
    unit: float = 1.0  # of the target

    @property
    def loss(self) -> str:
        return "loss" if self.classes else "mse"

    @property
    def penalties(self) -> Floats:
        return SOFTMAX if self.classes else RIDGE

    def scores(self, part: Part, answer: Floats) -> dict[str, Floats]:
        """The metrics of every client (NaN: no rows); `answer` is the prediction, or the chance of every class."""
        if self.classes:
            chance = np.maximum(answer[np.arange(len(part.y)), part.y], 1e-12)
            rows = {"accuracy": (answer.argmax(1) == part.y).astype(float), "loss": -np.log(chance)}
        else:
            rows = {"mse": ((answer - part.y) * self.unit) ** 2}
        count = np.bincount(part.client, minlength=len(self.clients)).astype(float)
        count[count == 0] = np.nan
        return {name: np.bincount(part.client, values, len(self.clients)) / count for name, values in rows.items()}

    def badness(self, answer: Floats) -> float:
        """What choices go by: the mean over clients of the loss on validation rows."""
        return float(np.nanmean(self.scores(self.validation, answer)[self.loss]))


Fit = tuple[Callable[[Part], Floats], dict[str, Any]]  # predictions for rows, and what was chosen


def splits(path: Path, table: Table) -> Iterator[Split]:
    """The table with each seed."""
    population = read_table(path, table.client, table.target, features=table.features, task=table.task)
    raw, y = population.columns["x"].numpy().astype(float), population.columns["y"].numpy()
    regression = population.about["task"] == "regression"
    y = y.astype(float) if regression else y
    owner = np.repeat(np.arange(len(population)), population.sizes())
    for seed in SEEDS:
        cut = cross_silo(population, SplitConfig().fractions, seed)
        found: list[Rows] = [cut.train, cut.selection.validation, cut.test.query]
        train, validation, test = (rows.of(rows.clients)[0] for rows in found)
        x = _scaled(raw, train)
        mean, unit = (y[train].mean(), y[train].std()) if regression else (0, 1)
        goal = (y - mean) / unit if regression else y
        parts = [Part(x[rows], goal[rows], owner[rows]) for rows in (train, validation, test)]
        yield Split(*parts, list(population.ids), 0 if regression else int(y.max()) + 1, float(unit))


def _scaled(x: Floats, train: Ints) -> Floats:
    """Every feature minus its training mean, by its training deviation; 0 where missing; ones in front."""
    mean = np.nanmean(x[train], 0)
    deviation = np.nanstd(x[train], 0)
    scaled = (x - mean) / np.where(deviation <= 1e-7 * np.maximum(np.abs(mean), 1e-30), 1.0, deviation)
    return np.column_stack([np.ones(len(x)), np.nan_to_num(scaled, nan=0.0)])


# Linear fits


def _apply(split: Split, w: Floats) -> Callable[[Part], Floats]:
    """Predictions by the coefficients of each client (or the one row that serves all)."""

    def predict(part: Part) -> Floats:
        own = w[part.client] if len(w) > 1 else w
        if split.classes:
            return probabilities((own @ part.x[:, :, None])[..., 0])
        return (own * part.x).sum(1)

    return predict


def _constant(split: Split) -> Floats:
    """The coefficients that answer with the training mean or frequencies: (d,) or (classes, d)."""
    width = split.train.x.shape[1]
    if not split.classes:
        return np.zeros(width)
    share = np.bincount(split.train.y, minlength=split.classes) / len(split.train.y)
    w = np.zeros((split.classes, width))
    w[:, 0] = np.log(np.maximum(share, 1e-6))
    return w


def constant(split: Split) -> Fit:
    return _apply(split, _constant(split)[None]), {}


def _best(split: Split, tried: Iterator[tuple[dict[str, float], Floats]]) -> tuple[Floats, dict[str, Any]]:
    """The coefficients that are best on validation rows."""
    scored = [(split.badness(_apply(split, w)(split.validation)), chosen, w) for chosen, w in tried]
    _, chosen, w = min(scored, key=lambda entry: entry[0])
    return w, chosen


def _pooled(split: Split) -> tuple[Floats, dict[str, Any]]:
    centre, width = _constant(split), split.train.x.shape[1]

    def tried() -> Iterator[tuple[dict[str, float], Floats]]:
        part, everyone = split.train, np.zeros(len(split.train.y), np.int64)
        one = Padded.of(part.x, part.y, split.classes, everyone, 1) if split.classes else None
        sums = None if split.classes else Sums.of(part.x, part.y, everyone, 1)
        for value in split.penalties:
            penalty = np.full(width, value)
            penalty[0] = 1e-8
            yield {"penalty": value}, one.softmax(penalty, centre) if one else sums.ridge(penalty, centre)

    return _best(split, tried())


def pooled(split: Split) -> Fit:
    w, chosen = _pooled(split)
    return _apply(split, w), chosen


def _own(split: Split, centre: Floats) -> Fit:
    """A fit for each client, pulled to a centre; slopes and intercept have a penalty each."""
    part, clients, width = split.train, len(split.clients), split.train.x.shape[1]

    def tried() -> Iterator[tuple[dict[str, float], Floats]]:
        own = Padded.of(part.x, part.y, split.classes, part.client, clients) if split.classes else None
        sums = None if split.classes else Sums.of(part.x, part.y, part.client, clients)
        for intercept in INTERCEPT:
            w = None
            for value in split.penalties[::-1]:  # from the centre outwards: every fit starts at the one before
                penalty = np.full(width, value)
                penalty[0] = intercept
                w = own.softmax(penalty, centre, w) if own else sums.ridge(penalty, centre)
                yield {"penalty": value, "intercept": intercept}, w
        # the centre itself: a client's own rows may be worth nothing
        yield {"penalty": np.inf, "intercept": np.inf}, np.broadcast_to(centre, (clients, *centre.shape))

    w, chosen = _best(split, tried())
    return _apply(split, w), chosen


def local(split: Split) -> Fit:
    return _own(split, _constant(split))


def shrunken(split: Split) -> Fit:
    return _own(split, _pooled(split)[0][0])


# Mixed models


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in a fit that computes too long; time spent waiting for a busy machine does not count."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not finished after {seconds} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _independent(x: Floats) -> Ints:
    """Columns that are not sums of the others, the first among them: statsmodels wants a matrix of full rank."""
    from scipy.linalg import qr

    kept = [0]
    _, triangle, order = qr(x[:, 1:] - x[:, 1:].mean(0), mode="economic", pivoting=True)
    size = np.abs(np.diag(triangle))
    kept += [int(place) + 1 for place, value in zip(order, size) if value > 1e-6 * max(size[0], 1e-300)]
    return np.sort(kept)


def _random(part: Part, columns: Ints) -> Ints:
    """The columns that vary within clients: others can have no random slope."""
    sizes = np.maximum(np.bincount(part.client), 1)
    varies = [0]
    for column in columns[1:]:
        values = part.x[:, column]
        mean = np.bincount(part.client, values) / sizes
        if np.square(values - mean[part.client]).mean() > 1e-6:
            varies.append(int(column))
    return np.array(varies)


def _mixed(split: Split, slopes: bool) -> Fit:
    from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

    part = split.train
    columns = _independent(part.x)
    random = _random(part, columns) if slopes else np.array([0])
    if slopes and len(random) == 1:
        raise ValueError("no feature varies within clients")
    if slopes and len(random) - 1 > MOST_SLOPES:
        raise ValueError(f"{len(random) - 1} features are too many for random slopes")
    model = MixedLM(part.y, part.x[:, columns], part.client, part.x[:, random])
    diagonal = MixedLMParams.from_components(np.ones(len(columns)), np.eye(len(random))) if slopes else None
    found: list[Any] = []
    for method in OPTIMIZERS:
        with suppress(np.linalg.LinAlgError, TimeoutError), limited(SECONDS):
            found.append(model.fit(reml=True, free=diagonal, method=method))
        if found and np.diag(found[-1].cov_re).max() > 1e-6:
            break  # where all variances are zero the gradient vanishes, whether that is best or not
    if not found:
        raise ValueError(f"neither {' nor '.join(OPTIMIZERS)} ended with finite numbers within {SECONDS} s")
    best = max(found, key=lambda result: result.llf)
    w = np.zeros((len(split.clients), part.x.shape[1]))
    w[:, columns] = best.fe_params
    residuals = part.y - part.x[:, columns] @ best.fe_params
    for client in np.unique(part.client):
        mine = part.client == client
        w[client, random] += _blup(part.x[mine][:, random], residuals[mine], np.asarray(best.cov_re), best.scale)
    variances = np.diag(np.asarray(best.cov_re)).tolist()
    return _apply(split, w), {
        "variances": variances,
        "residual": float(best.scale),
        "converged": bool(best.converged),
        "reml": float(best.llf),
    }


def _blup(z: Floats, residual: Floats, covariance: Floats, noise: float) -> Floats:
    """A client's random effects: G Z' (Z G Z' + s^2 I)^-1 r. statsmodels' own need a G that can be inverted."""
    return covariance @ z.T @ np.linalg.solve(z @ covariance @ z.T + noise * np.eye(len(z)), residual)


def _mixed_two_classes(split: Split) -> Fit:
    from scipy.sparse import csr_matrix
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    part, clients = split.train, len(split.clients)
    columns = _independent(part.x)
    rows = np.arange(len(part.y))
    who = csr_matrix((np.ones(len(rows)), (rows, part.client)), (len(rows), clients))
    model = BinomialBayesMixedGLM(part.y, part.x[:, columns], who, np.zeros(clients, int), vcp_p=1.0, fe_p=5.0)
    with limited(SECONDS):
        found = model.fit_vb()
    w = np.zeros((clients, 2, part.x.shape[1]))
    w[:, 1, columns] = found.fe_mean
    w[:, 1, 0] += found.vc_mean
    return _apply(split, w), {"log deviation": float(found.vcp_mean[0])}


def mixed_intercept(split: Split) -> Fit:
    if split.classes > 2:
        raise ValueError("statsmodels has no mixed model of more than two classes")
    return _mixed_two_classes(split) if split.classes else _mixed(split, slopes=False)


def mixed_slopes(split: Split) -> Fit:
    if split.classes:
        raise ValueError("statsmodels has no mixed model of classes with random slopes")
    return _mixed(split, slopes=True)


# Trees


def _trees(split: Split, known: bool) -> Fit:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import KFold, StratifiedKFold
    from sklearn.preprocessing import TargetEncoder

    folds = (StratifiedKFold if split.classes else KFold)(5, shuffle=True, random_state=0)
    encoder = TargetEncoder(target_type="auto" if split.classes else "continuous", cv=folds)
    codes = encoder.fit_transform(split.train.client[:, None], split.train.y)  # a row's own target is left out

    def features(part: Part) -> Floats:
        if not known:
            return part.x[:, 1:]
        means = codes if part is split.train else encoder.transform(part.client[:, None])
        return np.column_stack([part.x[:, 1:], means])

    kind = HistGradientBoostingClassifier if split.classes else HistGradientBoostingRegressor
    model = kind(
        max_iter=300, learning_rate=0.05, max_leaf_nodes=15, min_samples_leaf=5, early_stopping=False, random_state=0
    )  # fmt: skip
    model.fit(features(split.train), split.train.y)

    def stages(part: Part) -> Iterator[Floats]:
        if not split.classes:
            yield from model.staged_predict(features(part))
            return
        for chances in model.staged_predict_proba(features(part)):
            answer = np.zeros((len(chances), split.classes))
            answer[:, model.classes_] = chances
            yield answer

    best = int(np.argmin([split.badness(answer) for answer in stages(split.validation)]))
    return lambda part: next(a for i, a in enumerate(stages(part)) if i == best), {"trees": best + 1}


def trees(split: Split) -> Fit:
    return _trees(split, known=False)


def trees_client(split: Split) -> Fit:
    return _trees(split, known=True)


FITS: dict[str, Callable[[Split], Fit]] = {
    "constant": constant,
    "pooled": pooled,
    "local": local,
    "shrunken": shrunken,
    "mixed-intercept": mixed_intercept,
    "mixed-slopes": mixed_slopes,
    "trees": trees,
    "trees-client": trees_client,
}


# All of it


def consult(table: Table, folder: Path) -> None:
    """Fit everything to one table with every seed: FOLDER/oracle/NAME.parquet (clients) and NAME.json (choices)."""
    from threadpoolctl import threadpool_limits  # small matrices: threads would only wait for each other

    path = table.write(folder / "tables")
    begun, rows, chosen, failed = time.process_time(), [], {}, {}
    about: dict[str, Any] = {}
    for seed, split in zip(SEEDS, splits(path, table)):
        about = {
            "task": f"{split.classes} classes" if split.classes else "regression",
            "clients": len(split.clients),
            "rows": sum(len(part.y) for part in (split.train, split.validation, split.test)),
            "features": split.train.x.shape[1] - 1,
        }
        for name, fit in FITS.items():
            if name in failed:  # with another seed: a fit counts if it is there for all
                continue
            try:
                with warnings.catch_warnings(), threadpool_limits(1):
                    warnings.simplefilter("ignore")
                    predict, choice = fit(split)
            except (ValueError, TimeoutError) as error:
                failed[name] = str(error)
                continue
            chosen[f"{name} {seed}"] = choice
            for part_name, part in (("validation", split.validation), ("test", split.test)):
                scores = split.scores(part, predict(part))
                rows.append(pd.DataFrame({
                    "fit": name, "seed": seed, "part": part_name, "client": split.clients, **scores,
                }))  # fmt: skip
    scores = pd.concat(rows)
    target = folder / "oracle" / f"{table.slug}.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    scores[~scores["fit"].isin(failed)].to_parquet(target, index=False)
    about |= {"seconds": time.process_time() - begun, "failed": failed, "chosen": chosen}
    write_text(target.with_suffix(".json"), json.dumps(about, indent=1))  # last: without it the table is unfinished
