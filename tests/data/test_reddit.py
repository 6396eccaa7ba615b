"""Reddit in ConvoKit's layout, old and new, on files made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bespoke.data.population import Population
from bespoke.data.sources.registry import load_source
from bespoke.errors import UserError
from command import bespoke, refused

Entry = dict[str, Any]
SMALL = {"least": 5, "least_of_subreddit": 10}


def entries(users: dict[str, dict[str, int]]) -> list[Entry]:
    """So many utterances of each user in each subreddit, in the newer layout."""
    return [
        {
            "id": f"{user}-{place}-{n}", "speaker": user, "conversation_id": f"in-{place}", "reply_to": None,
            "timestamp": 1000 + n, "text": f"some words {n}", "meta": {"score": 1, "subreddit": place}, "vectors": [],
        }
        for user, places in users.items() for place, count in places.items() for n in range(count)
    ]  # fmt: skip


def write(folder: Path, said: list[Any]) -> Path:
    (folder / "reddit").mkdir(exist_ok=True)
    path = folder / "reddit" / "utterances.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in said), encoding="utf-8")
    return path


def sizes(population: Population) -> dict[str, int]:
    return dict(zip(population.ids, population.sizes().tolist()))


def test_users_and_subreddits_with_enough_utterances(folder: Path) -> None:
    """Of 5 a user and 10 a subreddit: eve and `rare` go, then dan, then `art`, then cid; ann, bob and `news` stay."""
    said = entries({
        "ann": {"news": 5, "rare": 1}, "bob": {"news": 6, "art": 4}, "cid": {"news": 4, "art": 4},
        "dan": {"art": 3, "rare": 3}, "eve": {"art": 4}, "[deleted]": {"news": 9},
    })  # fmt: skip
    useless = entries({"eve": {"art": 6}})
    for entry, text in zip(useless, ("[removed]", " [deleted]\n", "two words", "", "No!", "?")):
        entry["text"] = text
    write(folder, said + useless)
    population = load_source("reddit", **SMALL)
    assert sizes(population) == {"ann": 5, "bob": 6}
    assert population.about["contexts"] == ["news"]
    assert population.columns["time"].tolist() == [1000 + n for n in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5)]
    # 15 of 49 deleted or short; of 34 others 11 are kept
    assert population.about["notes"][:2] == [
        "15 of 49 utterances were left out: they are deleted or have fewer than 3 words.",
        "23 more were left out: they are of users with fewer than 5 or of subreddits with fewer than 10.",
    ]
    assert sum(sizes(load_source("reddit", **SMALL, most=3)).values()) == 6
    with pytest.raises(UserError, match=r"no user of .* has 50 utterances in subreddits of 150; lower the options"):
        load_source("reddit")


def test_the_defaults_are_the_papers(folder: Path) -> None:
    write(folder, entries({"ann": {"news": 50, "art": 100}, "bob": {"news": 100, "art": 49}, "cid": {"art": 48}}))
    population = load_source("reddit")  # cid has 48; then art has 149
    assert sizes(population) == {"ann": 50, "bob": 100}
    write(folder, entries({"ann": {"news": 50, "art": 100}, "bob": {"news": 100, "art": 50}, "cid": {"art": 49}}))
    population = load_source("reddit")
    assert sizes(population) == {"ann": 150, "bob": 150}
    codes = population.columns["context"][:150].tolist()
    assert [population.about["contexts"][c] for c in codes] == ["news"] * 50 + ["art"] * 100
    assert not population.groups


@pytest.mark.parametrize("wrapped", [False, True])
def test_older_names_and_subreddits_of_conversations(folder: Path, wrapped: bool) -> None:
    new = entries({"ann": {"news": 6, "art": 6}, "bob": {"news": 6, "art": 6}})
    write(folder, new)
    expected = load_source("reddit", **SMALL)
    old = [
        {"id": e["id"], "user": e["speaker"], "root": e["conversation_id"], "reply_to": None,
         "timestamp": str(e["timestamp"]), "text": e["text"], "meta": {"score": 1}}
        for e in new
    ]  # fmt: skip
    path = write(folder, old)
    with pytest.raises(UserError, match=r"the subreddit None in line 1.*expected ConvoKit's"):
        load_source("reddit", **SMALL)
    told = {f"in-{place}": {"title": "x", "subreddit": place} for place in ("news", "art")}
    conversations = {name: {"meta": meta, "vectors": []} for name, meta in told.items()} if wrapped else told
    path.with_name("conversations.json").write_text(json.dumps(conversations), encoding="utf-8")
    found = load_source("reddit", **SMALL)
    assert sizes(found) == sizes(expected) == {"ann": 12, "bob": 12}
    assert found.about["contexts"] == ["art", "news"]
    for name, column in expected.columns.items():
        assert found.columns[name].tolist() == column.tolist()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"speaker": "ann"', "in line 3"),
        ("[1, 2]", "'[1, 2]' in line 3, expected a JSON object in every line"),
        ('{"text": "a b c", "meta": {"subreddit": "x"}}', "the speaker None in line 3"),
        ('{"speaker": "", "text": "a b c", "meta": {"subreddit": "x"}}', "the speaker '' in line 3"),
        ('{"speaker": "ann", "text": 7, "meta": {"subreddit": "x"}}', "the text 7 in line 3"),
        ('{"speaker": "ann", "text": "a", "meta": "x"}', "the subreddit None in line 3"),
        (
            '{"speaker": "a", "text": "a", "meta": {"subreddit": "x"}, "timestamp": "noon"}',
            "timestamp 'noon' in line 3",
        ),
    ],
)
def test_bad_lines(folder: Path, tmp_path: Path, line: str, said: str) -> None:
    path = write(folder, entries({"ann": {"news": 2}}))
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    refused(bespoke("compare", "reddit", "--out", tmp_path / "run"), "utterances.jsonl is damaged", said)


def test_bytes_that_are_no_text_and_bad_conversations(folder: Path) -> None:
    path = write(folder, entries({"ann": {"news": 2}}))
    path.write_bytes(path.read_bytes() + b"\xff\n")
    with pytest.raises(UserError, match=r"utterances\.jsonl.*expected UTF-8 text"):
        load_source("reddit")
    path = write(folder, [{"speaker": "ann", "text": "a b c", "conversation_id": "x"}])
    for text in ("{", "[]"):
        path.with_name("conversations.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"conversations\.json.*expected a JSON object by conversation"):
            load_source("reddit")
