"""Reddit in ConvoKit's layout, the larger dataset of FedPC (Silva et al., 2022): a subreddit is a context.

Read from utterances.jsonl, a JSON object in each line: `speaker` (in older versions `user`), `text`, `timestamp`, and
`subreddit` in `meta`. Where an utterance does not say its subreddit, its conversation does: `conversation_id` (in older
versions `root`) names an entry of conversations.json beside the file.

As in the paper, users have at least 50 utterances and subreddits at least 150. The paper does not say in which order it
filters: here both are dropped again and again until what is left meets both.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.data.population import Population
from bespoke.data.sources.formats.spoken import SHORTEST, Utterance, kept_rows, long_enough, spoken
from bespoke.data.sources.registry import at_least, damaged, find_file
from bespoke.errors import UserError
from bespoke.plain import JsonObject

FILE = "reddit/utterances.jsonl"
CONVERSATIONS = "conversations.json"
REMOVED = ("[deleted]", "[removed]")  # instead of a user or a text
Timed = tuple[Utterance, float]  # with its time in seconds
LAYOUT = "ConvoKit's: speaker (or user), text, timestamp, and meta with subreddit"


def load(
    least: int = 50,
    least_of_subreddit: int = 150,
    most: int = 0,
    length: int = 32,
    tokenizer: str = "words",
    pretrained: str = "",
    end: bool = True,
) -> Population:
    """Users of at least `least` utterances in subreddits of at least `least_of_subreddit`.

    most: a user keeps so many of its utterances, drawn at random; 0: all. length: tokens that are kept of an utterance.
    tokenizer: words, characters, the folder of a Hugging Face tokenizer, or "model": that of the model `pretrained`.
    end: the end of an utterance is predicted too.
    """
    at_least("reddit", 0, most=most)
    at_least("reddit", 1, least=least, least_of_subreddit=least_of_subreddit)
    at_least("reddit", SHORTEST, length=length)
    path = find_file(FILE, "reddit")
    found = list(_utterances(path))
    usable = [(one, time) for one, time in found if not is_removed(one) and long_enough(one.text)]
    chosen = frequent(usable, least, least_of_subreddit)
    if not chosen:
        raise UserError(
            f"the source 'reddit': no user of {path} has {least} utterances in subreddits of {least_of_subreddit}; "
            "lower the options 'least' and 'least_of_subreddit'"
        )
    rows = kept_rows([one.user for one, _ in chosen], most)
    said = [chosen[row][0] for row in rows]
    notes = [
        f"{len(found) - len(usable):,} of {len(found):,} utterances were left out: they are deleted or have fewer than "
        f"{SHORTEST} words.",
        f"{len(usable) - len(chosen):,} more were left out: they are of users with fewer than {least} or of subreddits "
        f"with fewer than {least_of_subreddit}.",
    ]
    return spoken(
        "reddit", said, contexts=sorted({one.context for one in said}), context="subreddit", length=length,
        tokenizer=tokenizer, pretrained=pretrained, end=end, notes=notes,
        columns={"time": np.array([chosen[row][1] for row in rows])},
    )  # fmt: skip


def is_removed(one: Utterance) -> bool:
    """Whether the user or the text was deleted."""
    return one.user in REMOVED or one.text.strip() in REMOVED


def frequent(said: list[Timed], least: int, least_of_context: int) -> list[Timed]:
    """The utterances of the largest sets of users and contexts that have so many of them each."""
    while True:
        users = Counter(one.user for one, _ in said)
        contexts = Counter(one.context for one, _ in said)
        kept = [
            timed for timed in said if users[timed[0].user] >= least and contexts[timed[0].context] >= least_of_context
        ]
        if len(kept) == len(said):
            return said
        said = kept


def _utterances(path: Path) -> Iterator[Timed]:
    subreddits: dict[str, Any] | None = None
    number = 0
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise damaged(path, f"{line.strip()[:60]!r} in line {number}", "a JSON object in every line")
                meta = entry.get("meta")
                subreddit = meta.get("subreddit") if isinstance(meta, dict) else None
                if subreddit is None:
                    subreddits = _of_conversations(path.with_name(CONVERSATIONS)) if subreddits is None else subreddits
                    subreddit = subreddits.get(str(entry.get("conversation_id", entry.get("root"))))
                given: JsonObject = {
                    "speaker": entry.get("speaker", entry.get("user")), "text": entry.get("text"),
                    "subreddit": subreddit,
                }  # fmt: skip
                for name, value in given.items():
                    if not isinstance(value, str) or (not value and name != "text"):
                        raise damaged(path, f"the {name} {value!r} in line {number}", LAYOUT)
                yield Utterance(given["speaker"], given["subreddit"], given["text"]), _seconds(entry, path, number)
        except UnicodeDecodeError as error:
            raise damaged(path, f"{error} after line {number}", "UTF-8 text") from None
        except json.JSONDecodeError as error:
            raise damaged(path, f"{error} in line {number}", "a JSON object in every line") from None


def _seconds(entry: JsonObject, path: Path, number: int) -> float:
    """The timestamp, which some versions have as a text; 0 where there is none."""
    try:
        return float(entry.get("timestamp") or 0)
    except (TypeError, ValueError):
        raise damaged(path, f"the timestamp {entry['timestamp']!r} in line {number}", "seconds since 1970") from None


def _of_conversations(path: Path) -> dict[str, Any]:
    """The subreddit of each conversation; none if there is no such file. Newer versions have it in `meta`."""
    if not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(path, error, "a JSON object by conversation") from None
    if not isinstance(entries, dict):
        raise damaged(path, type(entries).__name__, "a JSON object by conversation")
    users = {name: entry for name, entry in entries.items() if isinstance(entry, dict)}
    return {name: (e["meta"] if isinstance(e.get("meta"), dict) else e).get("subreddit") for name, e in users.items()}
