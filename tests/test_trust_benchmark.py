"""benchmarks/trust: the rule finds what it says, the oracle's fits are optimal, the verdicts follow from numbers."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks is no part of the installed package
statsmodels = pytest.importorskip("statsmodels.api", reason="the extra `trust` (statsmodels) is not installed")

from benchmarks.trust import judge, oracle, page, run, tables  # noqa: E402
from benchmarks.trust.linear import Padded, Sums  # noqa: E402

from bespoke.errors import UserError  # noqa: E402


@pytest.fixture
def random() -> Any:
    return np.random.default_rng(3)


# Tables


def test_every_table_that_passes_the_rule_is_declared_or_left_out_with_a_reason() -> None:
    assert tables.verify() == []
    assert len(tables.declared()) >= 20
    names = {table.name for table in tables.declared()}
    assert not names & {"mlmRev/Chem97", "mlmRev/Hsb82", "mlmRev/Exam", "dslabs/movielens"}  # built into bespoke


def test_the_rule_counts_rows_clients_and_columns() -> None:
    def frame(clients: Any, rows: Any, features: int = 2) -> Any:
        columns = {f"x{i}": np.arange(clients * rows) for i in range(features)}
        return pd.DataFrame({"id": np.repeat(np.arange(clients), rows), "y": 0.0, **columns})

    assert tables.passes("plm", frame(40, 8))
    assert tables.passes("any", frame(40, 8))  # a column named id
    assert not tables.passes("any", frame(40, 8).rename(columns={"id": "who"}))
    assert tables.passes("plm", frame(40, 8).rename(columns={"id": "who"}))
    assert not tables.passes("any", frame(60, 7))  # seven rows each
    assert not tables.passes("any", frame(37, 8))  # 296 rows
    assert not tables.passes("any", frame(4, 100))  # four clients
    assert not tables.passes("any", frame(40, 8, features=1))


def test_a_shuffle_moves_clients_and_nothing_else(tmp_path: Path) -> None:
    (table,) = tables.declared(["Milk"])
    plain, first, again, second = (
        pd.read_csv(table.write(tmp_path / str(i), turn)) for i, turn in enumerate((None, 0, 0, 1))
    )
    others = [table.target, *table.features]
    pd.testing.assert_frame_equal(plain[others], first[others])
    pd.testing.assert_frame_equal(first, again)
    assert sorted(first["Cow"]) == sorted(plain["Cow"])
    assert (first["Cow"] == plain["Cow"]).mean() < 0.1
    assert (first["Cow"] == second["Cow"]).mean() < 0.1


def test_a_table_that_is_not_declared_is_refused() -> None:
    with pytest.raises(UserError, match=r"Mlik.*Milk"):
        tables.declared(["Mlik"])


# Linear fits


def test_ridge_of_every_client_is_that_of_scikit_learn(random: np.random.Generator) -> None:
    x, y = random.normal(size=(60, 3)), random.normal(size=60)
    client = random.integers(0, 4, 60)
    found = Sums.of(x, y, client, 4).ridge(np.full(3, 2.5), np.zeros(3))
    for c in range(4):
        expected = Ridge(2.5, fit_intercept=False).fit(x[client == c], y[client == c]).coef_
        np.testing.assert_allclose(found[c], expected, rtol=1e-9)


def test_a_ridge_pulled_to_a_centre_ends_there_if_the_pull_is_strong(random: np.random.Generator) -> None:
    x, y, centre = random.normal(size=(30, 2)), random.normal(size=30), np.array([3.0, -1.0])
    sums = Sums.of(x, y, np.zeros(30, int), 2)  # the second client has no rows
    np.testing.assert_allclose(sums.ridge(np.full(2, 1e9), centre)[0], centre, atol=1e-6)
    np.testing.assert_allclose(sums.ridge(np.full(2, 0.1), centre)[1], centre)
    least = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(sums.ridge(np.full(2, 1e-9), centre)[0], least, atol=1e-6)


def test_softmax_of_every_client_is_that_of_scikit_learn(random: np.random.Generator) -> None:
    x = random.normal(size=(150, 3))
    y = (x @ random.normal(size=(3, 3)) + random.gumbel(size=(150, 3))).argmax(1)
    client = np.repeat([0, 1], [40, 110])
    found = Padded.of(x, y, 3, client, 2).softmax(np.full(3, 0.5), np.zeros((3, 3)))
    for c in range(2):
        model = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10, max_iter=10_000)
        np.testing.assert_allclose(found[c], model.fit(x[client == c], y[client == c]).coef_, atol=1e-5)


def test_softmax_ends_where_its_gradient_is_zero_even_if_classes_are_separable(random: np.random.Generator) -> None:
    x = np.column_stack([np.ones(20), np.linspace(-1, 1, 20)])
    y = (x[:, 1] > 0).astype(int)
    centre, penalty = np.array([[0.3, 0.0], [-0.3, 1.0]]), np.array([0.01, 0.001])
    w = Padded.of(x, y, 2, np.zeros(20, int), 1).softmax(penalty, centre)[0]
    chances = np.exp(x @ w.T)
    chances /= chances.sum(1, keepdims=True)
    slope = (chances - np.eye(2)[y]).T @ x + penalty * (w - centre)
    np.testing.assert_allclose(slope, 0, atol=1e-6)


# The oracle


def made(random: np.random.Generator, clients: int = 30, rows: int = 20, spread: float = 1.0, classes: int = 0) -> Any:
    """y = a_c + b_c x + noise of deviation 1/2, with a_c and b_c of deviation `spread` around 0 and 1."""
    own = random.normal(size=(clients, 2)) * spread + [0.0, 1.0]
    client = np.repeat(np.arange(clients), rows)
    x = np.column_stack([np.ones(len(client)), random.normal(size=len(client))])
    y = (own[client] * x).sum(1) + random.normal(size=len(client)) / 2
    if classes:
        y = (y > 0).astype(int)
    place = np.tile(np.arange(rows), clients)
    parts = [oracle.Part(x[w], y[w], client[w]) for w in (place < 12, (place >= 12) & (place < 16), place >= 16)]
    return oracle.Split(*parts, [str(c) for c in range(clients)], classes), own


def test_fits_come_near_the_noise_where_clients_differ(random: np.random.Generator) -> None:
    split, _ = made(random)
    error = {}
    for name, fit in oracle.FITS.items():
        predict, _ = fit(split)
        error[name] = np.nanmean(split.scores(split.test, predict(split.test))["mse"])
    # the noise has variance 1/4, clients' coefficients add 2 (1 + x^2 on average) to what one model cannot explain
    assert error["constant"] > error["pooled"] > 1.2
    assert all(0.2 < error[name] < 0.4 for name in ("local", "shrunken", "mixed-slopes"))
    assert error["mixed-slopes"] < error["mixed-intercept"] < error["pooled"]


def test_the_mixed_model_finds_the_variances(random: np.random.Generator) -> None:
    split, own = made(random, clients=60)
    _, chosen = oracle.mixed_slopes(split)
    np.testing.assert_allclose(chosen["variances"], own.var(0), rtol=0.3)
    np.testing.assert_allclose(chosen["residual"], 0.25, rtol=0.15)


def test_clients_that_are_alike_are_shrunken_to_the_pooled_fit(random: np.random.Generator) -> None:
    split, _ = made(random, spread=0.0)
    (pooled, _), (shrunken, chosen) = oracle.pooled(split), oracle.shrunken(split)
    assert chosen["penalty"] >= 10
    np.testing.assert_allclose(shrunken(split.test), pooled(split.test), atol=0.4)


def test_classes_are_scored_by_accuracy_and_log_loss() -> None:
    part = oracle.Part(np.ones((3, 1)), np.array([0, 1, 1]), np.array([0, 0, 2]))
    split = oracle.Split(part, part, part, ["a", "b", "c"], 2)
    found = split.scores(part, np.array([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]]))
    np.testing.assert_allclose(found["accuracy"], [0.5, np.nan, 1.0])
    np.testing.assert_allclose(found["loss"], [-(np.log(0.8) + np.log(0.4)) / 2, np.nan, -np.log(0.9)])


def test_two_classes_have_a_mixed_model_too(random: np.random.Generator) -> None:
    split, _ = made(random, clients=40, classes=2)
    loss = {
        name: np.nanmean(split.scores(split.test, oracle.FITS[name](split)[0](split.test))["loss"])
        for name in ("constant", "pooled", "shrunken", "mixed-intercept")
    }
    assert loss["mixed-intercept"] < loss["pooled"] < loss["constant"]
    assert loss["shrunken"] < loss["mixed-intercept"]  # slopes differ too


def test_a_fit_without_an_end_is_stopped() -> None:
    with pytest.raises(TimeoutError, match="after 1 s"), oracle.limited(1):
        for _ in itertools.count():
            pass


def test_random_effects_are_those_of_statsmodels(random: np.random.Generator) -> None:
    split, _ = made(random)
    part = split.train
    found = statsmodels.MixedLM(part.y, part.x, part.client, part.x).fit()
    mine = part.client == 7
    residual = part.y[mine] - part.x[mine] @ found.fe_params
    effects = oracle._blup(part.x[mine], residual, np.asarray(found.cov_re), found.scale)
    np.testing.assert_allclose(effects, found.random_effects[7], rtol=1e-6)


def test_columns_that_repeat_others_are_left_to_statsmodels_once(random: np.random.Generator) -> None:
    a = random.normal(size=50)
    x = np.column_stack([np.ones(50), a, 1 - 2 * a, a**2])
    assert len(oracle._independent(x)) == 3
    assert oracle._independent(x)[0] == 0


# Verdicts


def scores(pooled: Any, own: Any, metric: str = "mse") -> Any:
    """Clients' scores under two fits in one seed; on validation rows, which must not matter, all are zero."""
    parts = [("pooled", "test", pooled), ("local", "test", own), ("local", "validation", np.zeros(len(own)))]
    return pd.concat([
        pd.DataFrame({"fit": fit, "seed": 0, "part": part, "client": range(len(values)), metric: values})
        for fit, part, values in parts
    ])  # fmt: skip


def answer(claims: Any, value: float = 1.0, interval: Any = (-60.0, -40.0), metric: str = "mse") -> Any:
    return judge.Answer(metric, 2.0, claims, "Local", value, "Local", interval, "", (0,))


def test_the_oracles_gain_is_that_of_the_means() -> None:
    found = judge.measured({}, scores([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))
    assert (found.personal, found.change, found.relative) == ("local", -2.0, -50.0)
    assert found.relative_interval == pytest.approx((-50.0, -50.0))  # every client gains half
    assert found.gain[0] > 0
    assert found.best_error == 2.0


def test_a_claim_is_right_where_the_oracle_gains_beyond_chance() -> None:
    gains = judge.measured({}, scores([2.0] * 9, [1.0] * 9))
    assert judge.judge(answer(True), gains) == judge.Judgement(True, True, True, 1.0)
    assert not judge.judge(answer(False, value=2.0), gains).sign  # a gain denied
    open_ = judge.measured({}, scores([2.0] * 10, [1.0] * 5 + [3.1] * 5))
    assert not judge.judge(answer(True), open_).sign  # a gain that the oracle does not see
    assert judge.judge(answer(False), open_).sign
    tiny = judge.measured({}, scores([2.0] * 9, [1.99] * 9))  # sure, but half a percent
    assert judge.judge(answer(False), tiny).sign


def test_the_oracles_interval_is_widened_for_the_choice_among_its_fits(random: np.random.Generator) -> None:
    own = 2.0 + random.normal(size=40) - 0.33  # the mean's deviation is 1/6: a gain of about two of them
    one = scores([2.0] * 40, own)
    more = pd.concat([one, *(scores([], [9.0] * 40).assign(fit=fit) for fit in ("shrunken", "mixed-slopes"))])
    narrow, wide = judge.measured({}, one), judge.measured({}, more)
    assert narrow.personal == wide.personal == "local"
    deviation = own.std() / np.sqrt(40)  # percentiles of a normal mean: 1.96 deviations, and 2.39 for 0.05 / 3
    for found, width in ((narrow, 1.96 * deviation), (wide, 2.39 * deviation)):
        np.testing.assert_allclose(np.array(found.interval) - found.change, [-width, width], rtol=0.1)


def test_close_and_size_have_their_bounds() -> None:
    gains = judge.measured({}, scores([2.0] * 9, [1.0] * 9))
    assert judge.judge(answer(True, value=1.1), gains).close
    assert not judge.judge(answer(True, value=1.11), gains).close
    assert not judge.judge(answer(True, interval=(-49.0, -40.0)), gains).size
    assert not judge.judge(answer(True, value=float("nan"), interval=(float("nan"),) * 2), gains).close


def test_accuracy_gains_upwards_and_errs_by_what_it_misses() -> None:
    gains = judge.measured({}, scores([0.5] * 9, [0.9] * 9, "accuracy"))
    assert gains.gain[0] == pytest.approx(0.4)
    assert gains.best_error == pytest.approx(0.1)
    found = judge.judge(answer(True, value=0.88, interval=(0.3, 0.5), metric="accuracy"), gains)
    assert (found.sign, found.close, found.size) == (True, False, True)  # 12 % missed instead of 10 %


def summary(verdict: Any, said: str = "Personalization helps: Local.", value: float = 1.0) -> Any:
    interval = {"low": -60.0, "high": None}
    against = {"verdict": verdict, "interval": interval, "relative_interval": interval}
    own = {"label": "local", "title": "Local", "personal": True, "mean": {"value": value}, "against": against}
    base = {"label": "fedavg", "title": "FedAvg", "personal": False, "mean": {"value": 2.0}, "against": None}
    return {"metric": "mse", "lower_is_better": True, "baseline": "fedavg", "methods": [base, own],
            "answer": ["So.", said], "seeds": [0, 1]}  # fmt: skip


def test_bespokes_claim_is_what_it_says() -> None:
    better = judge.understood(summary("better"))
    assert (better.claims, better.recommended, better.value, better.interval[0]) == (True, "Local", 1.0, -60.0)
    for sentence in ("No gain over a shared model that has converged: Local.", "Not clear: Local."):
        found = judge.understood(summary("better", sentence))
        assert (found.claims, found.recommended, found.value) == (False, "FedAvg", 2.0)
    assert np.isnan(judge.understood(summary("better", value=None)).value)


def test_the_oracle_speaks_of_the_seeds_that_bespoke_was_run_with(tmp_path: Path) -> None:
    (table,) = tables.declared(["Milk"])
    both = pd.concat([scores([2.0] * 4, [1.0] * 4), scores([2.0] * 4, [3.0] * 4).assign(seed=1)])
    (tmp_path / "oracle").mkdir()
    both.to_parquet(tmp_path / "oracle" / "nlme-Milk.parquet")
    (tmp_path / "oracle" / "nlme-Milk.json").write_text("{}")
    assert judge.read_oracle(table, tmp_path).change == 0.0
    assert judge.read_oracle(table, tmp_path, answer(True)).change == -1.0
    with pytest.raises(UserError, match=r"seeds \[2\]"):
        judge.read_oracle(table, tmp_path, replace(answer(True), seeds=(0, 2)))


# Runs


def test_it_runs_from_table_to_page_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    chosen = tables.declared(["RatPupWeight"])
    quick = "--rounds 2 --seeds 1 --methods fedavg,local"
    monkeypatch.setattr(oracle, "FITS", {name: oracle.FITS[name] for name in ("constant", "pooled", "shrunken")})
    oracle.consult(chosen[0], tmp_path)
    page.write(chosen, tmp_path, tmp_path / "early.md")
    assert "not been run" in (tmp_path / "early.md").read_text()

    run.answers(chosen, tmp_path, quick)
    out = tmp_path / "bespoke" / "nlme-RatPupWeight"
    before = (out / "summary.json").stat().st_mtime_ns
    run.answers(chosen, tmp_path, quick)
    assert (out / "summary.json").stat().st_mtime_ns == before  # done before
    (out / "summary.json").unlink()
    run.answers(chosen, tmp_path, quick)  # goes on with what was begun
    run.shuffled(chosen, tmp_path, quick, shuffles=1)
    assert judge.alarms(tmp_path)[1] == 1
    page.write(chosen, tmp_path, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "of 1 (promised" in text
    assert "| nlme/RatPupWeight | mse |" in text

    # the same rows of the same clients: bespoke's and the oracle's tables name them alike
    theirs = pd.read_parquet(next(out.glob("runs/local*/clients.parquet")))
    ours = pd.read_parquet(tmp_path / "oracle" / "nlme-RatPupWeight.parquet")
    assert set(theirs["client"].astype(str)) == set(ours["client"])


def test_a_failure_is_kept_and_a_stop_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (table,) = tables.declared(["RatPupWeight"])
    program = tmp_path / "python"
    monkeypatch.setattr(run.sys, "executable", str(program))
    for code, words in ((2, "bespoke: nonsense"), (130, "bespoke: stopped")):
        program.write_text(f"#!/bin/sh\necho working >&2\necho '{words}' >&2\nexit {code}\n")
        program.chmod(0o755)
        if code == 130:  # Ctrl-C: the rest is not begun
            with pytest.raises(KeyboardInterrupt):
                run.compare(table, tmp_path / "x.csv", tmp_path / "out" / "b", [])
        else:
            assert run.compare(table, tmp_path / "x.csv", tmp_path / "out" / "a", []) == "failed: bespoke: nonsense"
    assert (tmp_path / "out" / "a.error").read_text() == "exit code 2: bespoke: nonsense\n"
    assert not (tmp_path / "out" / "b.error").exists()


def test_the_oracles_constant_is_the_training_mean(tmp_path: Path) -> None:
    """A number by hand: the mean over clients of squared distances to the training mean, on bespoke's own split."""
    (table,) = tables.declared(["RatPupWeight"])
    split = next(oracle.splits(table.write(tmp_path), table))
    rows = pd.read_csv(tmp_path / "nlme-RatPupWeight.csv")
    sizes = [len(part.y) for part in (split.train, split.validation, split.test)]
    assert sum(sizes) == len(rows)
    assert sizes[0] / len(rows) == pytest.approx(0.6, abs=0.05)
    values = np.sort(np.concatenate([part.y for part in (split.train, split.validation, split.test)]))
    weight = np.sort(rows["weight"].to_numpy())
    np.testing.assert_allclose(np.diff(values) * split.unit, np.diff(weight), atol=1e-5)
    predict, _ = oracle.constant(split)
    np.testing.assert_allclose(predict(split.test), 0)
    assert split.train.y.mean() == pytest.approx(0, abs=1e-6)
    by_hand = pd.Series((split.test.y * split.unit) ** 2).groupby(split.test.client).mean()
    np.testing.assert_allclose(split.scores(split.test, predict(split.test))["mse"], by_hand, rtol=1e-9)
