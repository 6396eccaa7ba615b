from __future__ import annotations

import math

import numpy as np
import pytest

from bespoke.data.population import Population
from bespoke.data.texts import vocabulary as texts

SENTENCES = ["a b a", "a b", "zebra a b", "b c a b"]


def raw(length: int = 3, **options: object) -> Population:
    sentences = [sentence.split() for sentence in SENTENCES]
    settings = {"vocabulary": 10, "about": {"name": "posts"}, **options}
    return texts.population(sentences, ["u", "u", "u", "v"], length=length, **settings)  # type: ignore[arg-type]


def shown(population: Population, column: str) -> list[str]:
    names = ["_", *population.about["words"], "<unk>", "<bos>", "<eos>"]
    return [" ".join(names[token] for token in row) for row in population.columns[column].tolist()]


def test_rows_are_kept_as_they_are() -> None:
    population = raw()
    assert population.about["pieces"] == ["a", "b", "zebra", "c"]
    assert population.columns["pieces"].tolist() == [[1, 2, 1], [1, 2, 0], [3, 1, 2], [2, 4, 1]]
    assert population.columns["whole"].tolist() == [True, True, True, False]
    # a b a and an end; the row that was cut has no end: b c a
    assert population.columns["characters"].tolist() == [6, 4, 10, 5]
    assert raw(spaced=False).columns["characters"].tolist() == [4, 3, 8, 3]
    assert raw(end=False).columns["characters"].tolist() == [5, 3, 9, 5]


def test_the_vocabulary_is_of_training_rows_alone() -> None:
    rows = np.array([0, 1, 3])
    population = texts.encode(raw(), texts.learned(raw(), rows), rows)
    assert population.about["words"] == ["a", "b", "c"]  # four times, three times, once
    assert "zebra" not in str(population.about)
    assert population.about["vocabulary"] == 7
    assert population.about["unscored"] == [4, 6]
    assert shown(population, "y") == ["a b a <eos>", "a b <eos> _", "<unk> a b <eos>", "b c a _"]
    assert shown(population, "x") == ["<bos> a b a", "<bos> a b <eos>", "<bos> <unk> a b", "<bos> b c a"]
    assert len(population.about["features"]) == population.columns["x"].shape[1] == 4
    assert set(population.columns) == {"x", "y", "characters", "spelling"}


def test_the_vocabulary_is_limited() -> None:
    rows = np.arange(4)
    assert texts.learned(raw(vocabulary=2), rows) == ("a", "b")
    assert texts.learned(raw(least=2), rows) == ("a", "b")
    assert texts.learned(raw(unknown=["a"]), rows) == ("b", "c", "zebra")
    assert shown(texts.encode(raw(end=False), ["a"], rows), "y")[:2] == ["a <unk> a", "a <unk> _"]


def test_the_spelling_of_unknown_words() -> None:
    """Training row a b a: letters a twice, b once, three ends. One is added to each of them and to all the others."""
    population = texts.encode(raw(), ["a"], np.array([0]))
    total = 2 + 1 + 3 + 4  # letters, ends, and one each for a, b, the end and all others
    b, end, other = math.log2(total / 2), math.log2(total / 4), math.log2(total) + math.log2(0x110000)
    a = math.log2(total / 3)
    expected = [b + end, b + end, 3 * other + b + a + end + b + end, b + end + other + end]
    np.testing.assert_allclose(population.columns["spelling"].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("count", [32_763, 32_764])
def test_large_vocabularies_have_larger_tokens(count: int) -> None:
    population = texts.encode(raw(), [str(i) for i in range(count)], np.arange(4))
    assert str(population.columns["x"].dtype) == ("torch.int16" if count == 32_763 else "torch.int32")
    assert int(population.columns["x"].max()) == count + 3
