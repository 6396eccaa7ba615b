"""The TED talks: segments, copies left out, topics of training text alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from bespoke.data.population import NO_GROUP, Population
from bespoke.data.sources.formats.topics import grouped
from bespoke.data.sources.formats.unigrams import gains
from bespoke.data.sources.registry import load_source
from bespoke.data.sources.ted import words_of
from bespoke.data.splits import Split, cross_device, cross_silo
from bespoke.data.texts import vocabulary as texts
from bespoke.errors import UserError
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.prepare import prepare


def write(folder: Path, talks: list[tuple[str, str, str]]) -> None:
    (folder / "ted").mkdir(exist_ok=True)
    names = ("collection", "title", "text")
    columns = {name: [talk[place] for talk in talks] for place, name in enumerate(names)}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "ted" / "ted_talks.parquet")


def shown(population: Population) -> dict[str, list[str]]:
    words = ["", *population.about["pieces"]]
    lines = [" ".join(words[i] for i in row) for row in population.columns["pieces"].tolist()]
    return {
        name: lines[population.offsets[place] : population.offsets[place + 1]]
        for place, name in enumerate(population.ids)
    }


def spoken(prefix: str, words: int) -> list[str]:
    return [f"{prefix}{place}" for place in range(words)]


def test_segments_of_a_small_file(folder: Path) -> None:
    write(folder, [
        ("ted", "One", "Don't you—see?\n(Laughter) It's 10 o’clock.\nTranslator: A. B.\n[Music] Yes, yes. And"),
        ("tedx", "Short", "not enough"),
    ])  # fmt: skip
    population = load_source("ted", talks=0, segments=2, length=3, groups="collections")
    # nine words are three segments, of which the first two are kept
    assert shown(population) == {"ted/One": ["don't you see", "it's 10 o'clock"]}
    assert population.group_of(0) == "ted"
    assert not population.columns["whole"].any()  # segments are cut: no end is predicted
    assert "1 shorter talks" in population.about["notes"][0]
    assert words_of("A_b (x) C’s") == ["a", "b", "c's"]


def test_talks_that_stand_in_two_collections_count_once(folder: Path) -> None:
    first, other = spoken("a", 200), spoken("b", 200)
    captioned = [*first[:80], "um", *first[81:]]  # the same talk with another caption, and a few words before
    write(folder, [
        ("ted", "First", " ".join(first)),
        ("teded", "First again", " ".join(["welcome", "everybody", *captioned])),
        ("tedx", "First", " ".join(first).upper()),
        ("tedx", "Other", " ".join(other)),
    ])  # fmt: skip
    population = load_source("ted", talks=0, segments=5)
    assert len(population) == 2
    assert "tedx/Other" in population.ids
    assert "2 talks that repeat another one" in population.about["notes"][0]


def test_segments_that_repeat_are_left_out(folder: Path) -> None:
    opening = spoken("o", 20)
    talks = [[*opening, *spoken(name, 400)] for name in ("a", "b")]
    write(folder, [("ted", name, " ".join(talk)) for name, talk in zip("AB", talks)])
    population = load_source("ted", talks=0, segments=20)
    lines = [line for talk in shown(population).values() for line in talk]
    assert len(lines) == len(set(lines)) == 40
    assert "1 segments that repeat" in population.about["notes"][0]


def test_the_draw_is_by_seed_and_by_title(folder: Path) -> None:
    talks = [("ted", f"Talk {n}", " ".join(spoken(f"w{n}x", 40))) for n in range(12)]
    write(folder, talks)
    drawn = {seed: set(load_source("ted", talks=4, segments=2, seed=seed).ids) for seed in (0, 1)}
    assert drawn[0] != drawn[1]
    write(folder, talks[::-1])
    assert set(load_source("ted", talks=4, segments=2).ids) == drawn[0]
    with pytest.raises(UserError, match="12 talks have 2 segments of 20 words; lower the options 'talks'"):
        load_source("ted", talks=13, segments=2)


def test_files_of_another_layout(folder: Path) -> None:
    with pytest.raises(UserError, match=r"needs the file ted/ted_talks\.parquet"):
        load_source("ted")
    (folder / "ted").mkdir()
    (folder / "ted" / "ted_talks.parquet").write_text("no table")
    with pytest.raises(UserError, match="no readable Parquet file"):
        load_source("ted")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), folder / "ted" / "ted_talks.parquet")
    with pytest.raises(UserError, match="collection, title, text"):
        load_source("ted")


# Topics

KINDS = {"sea": "fish wave coral tide", "law": "judge court trial crime", "sky": "star moon comet orbit"}


def world(clusters: int = 3, talks: int = 8, rows: int = 8) -> Population:
    """Talks of three kinds that use the words of their kind, and words that all use."""
    random, sentences, clients = np.random.default_rng(0), [], []
    for number in range(talks * len(KINDS)):
        kind = list(KINDS)[number % len(KINDS)]
        for _ in range(rows):
            own = random.choice(KINDS[kind].split(), 4).tolist()
            sentences.append([*own, *random.choice(["the", "and", "we", "so"], 4).tolist()])
            clients.append(f"{kind}/{number:02}")
    about = {"name": "talks", "notes": [], "topics": {"clusters": clusters, "seed": 0}}
    return texts.population(sentences, clients, about=about, length=8, vocabulary=100)


def by_topic(population: Population) -> dict[str, set[str]]:
    """The kinds of talks in each topic."""
    found: dict[str, set[str]] = {}
    for place, name in enumerate(population.ids):
        found.setdefault(population.group_of(place), set()).add(name.partition("/")[0])
    return found


@pytest.mark.parametrize("silo", [True, False])
def test_topics_are_found_and_named_by_their_words(silo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespoke.data.sources.formats.topics.MOST", 0.5)  # a third of the talks are of a kind
    raw = world()
    population = grouped(raw, cross_silo(raw) if silo else cross_device(raw, seed=3))
    found = by_topic(population)
    assert sorted(map(sorted, found.values())) == [["law"], ["sea"], ["sky"]]
    for topic, (kind,) in ((name, kinds) for name, kinds in found.items()):
        assert set(topic.split()) < set(KINDS[kind].split())
    assert "topics" not in population.about
    assert grouped(population, cross_silo(population)) is population


def held_out_rows(raw: Population, split: Split) -> np.ndarray:
    parts = (split.selection.validation, split.test.validation, split.test.query)
    return np.unique(np.concatenate([part.of(part.clients)[0] for part in parts]))


@pytest.mark.parametrize("silo", [True, False])
def test_topics_are_of_training_text_alone(silo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespoke.data.sources.formats.topics.MOST", 0.5)
    raw = world()
    split = cross_silo(raw) if silo else cross_device(raw, own_validation=0.25)
    pieces = raw.columns["pieces"].clone()
    rows = held_out_rows(raw, split)
    assert len(rows) > 20
    # every held-out row now speaks of another kind, and has a word that occurs nowhere else
    words = [*raw.about["pieces"], "planted"]
    kinds = [name.partition("/")[0] for name in raw.ids]
    for row in rows:
        kind = kinds[int(np.searchsorted(raw.offsets, row, side="right")) - 1]
        other = KINDS[{"sea": "law", "law": "sky", "sky": "sea"}[kind]].split()
        pieces[row] = torch.tensor([words.index(word) + 1 for word in (*other, *other)])
    pieces[rows, 0] = len(words)
    planted = replace(raw, columns={**raw.columns, "pieces": pieces}, about={**raw.about, "pieces": words})
    parts = (replace_population(part, planted) for part in (split.train, split.selection, split.test))
    moved = Split(*parts, split.kind)  # type: ignore[arg-type]
    before, after = grouped(raw, split), grouped(planted, moved)
    assert before.groups == after.groups
    assert (before.group == after.group).all()
    # the same word in a training row would have counted
    trained, _ = split.train.of(split.train.clients)
    pieces[trained[: len(trained) // 2], :4] = len(words)
    assert any("planted" in name for name in grouped(planted, moved).groups)


def replace_population(part: object, population: Population) -> object:
    if hasattr(part, "population"):
        return replace(part, population=population)  # type: ignore[type-var]
    names = ("support", "validation", "query")
    moved = {name: replace(getattr(part, name), population=population) for name in names if hasattr(part, name)}
    return replace(part, **moved)  # type: ignore[type-var]


def test_an_experiment_has_topics_as_groups_and_says_that_they_were_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespoke.data.sources.formats.topics.MOST", 0.5)
    stages = [{"method": "fedavg", "rounds": 1}, {"method": "group-fl", "rounds": 1}]
    config = ExperimentConfig.model_validate({"data": {"source": "ted"}, "stage": stages})
    prepared = prepare(config, world())
    assert len(prepared.population.groups) == 3
    assert prepared.population.group is not None
    assert {"x", "y"} <= prepared.population.columns.keys()
    private = {"noise": 1.0, "clip": 1.0}
    private_config = ExperimentConfig.model_validate({"data": {"source": "ted"}, "stage": stages, "privacy": private})
    assert any("topics" in reason for reason in prepare(private_config, world()).population.about["unpaid"])


def test_too_few_talks_or_words() -> None:
    raw = world(clusters=30)
    with pytest.raises(UserError, match="30 topics of 24 training clients; ask for fewer topics"):
        grouped(raw, cross_silo(raw))
    raw = world()  # a third of the talks use each word
    with pytest.raises(UserError, match="no word is used by at least 3 and at most a quarter of the 24"):
        grouped(raw, cross_silo(raw))


def test_who_has_no_text_to_learn_from_has_no_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespoke.data.sources.formats.topics.MOST", 0.5)
    raw = world()
    split = cross_device(raw, held_out=(0.2, 0.2))
    fewer = replace(split, test=replace(split.test, support=replace(split.test.support, clients=np.zeros(0, np.int64))))
    population = grouped(raw, fewer)
    held_out = split.test.query.clients
    assert {population.group_of(int(client)) for client in held_out} == {NO_GROUP}


# Word frequencies


def test_gain_by_word_frequencies_by_hand() -> None:
    """Two groups with a word each: everybody's frequencies say 1/2, a group's own almost 1."""
    sentences = [["x"]] * 200 + [["y"]] * 200
    clients = [f"a{n // 20}" for n in range(200)] + [f"b{n // 20}" for n in range(200)]
    group = [name[0] for name in clients]
    raw = texts.population(sentences, clients, about={"name": "letters"}, length=1, vocabulary=2, group=group)
    split = cross_silo(raw)
    a, b, whole = gains(raw, split, 2)
    n = 140  # training rows of a group; half a count is added to x, y and unknown words
    common = (n + 0.5) / (2 * n + 1.5)
    own = (n + 100 * common) / (n + 100)  # the weakest pull towards everybody's is the best
    assert (a.group, a.clients, a.words) == ("a", 10, 30)
    assert a.common == pytest.approx(1 / common)
    assert a.own == pytest.approx(1 / own)
    assert b.percent == pytest.approx(100 * (1 - common / own))
    assert (whole.group, whole.clients, whole.words) == ("all", 20, 60)
    shuffled = replace(raw, group=np.arange(20) % 2)
    assert abs(gains(shuffled, split, 2)[-1].percent) < 0.5  # each has both words


def test_the_real_talks(real_data: Path) -> None:
    population = load_source("ted", talks=40, segments=8, clusters=3)
    assert (len(population), population.rows) == (40, 320)
    assert {name.partition("/")[0] for name in population.ids} <= {"ted", "tedx", "teded", "ted_archive"}
    found = grouped(population, cross_silo(population))
    assert len(found.groups) == 3
