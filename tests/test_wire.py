"""Messages between machines: what is decoded is what was encoded, and what is not a message is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bespoke.data.splits import Half, Part, Query, Support, Train, Validation
from bespoke.errors import RemoteLost, UserError, WorkerFailed
from bespoke.federation import wire
from bespoke.federation.calls import OPERATIONS, Call, Settle
from bespoke.federation.opening import Opening
from bespoke.federation.partial import Partial
from bespoke.federation.roster import Roster
from bespoke.federation.wire import WireError, decode_answer, decode_call, encode_answer, encode_call
from bespoke.randomness import client_keys

NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
DTYPES = st.sampled_from([np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_, np.float16])
TENSORS = DTYPES.flatmap(
    lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
TREES = st.recursive(
    TENSORS.map(lambda array: torch.from_numpy(np.array(array))),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
)
TREE = st.dictionaries(NAMES, TREES, max_size=3)
INTS = st.lists(st.integers(-(2**62), 2**62), max_size=5).map(lambda found: np.array(found, np.int64))
NUMBERS = st.integers(-(2**70), 2**70)
PARTS = st.builds(
    Part, st.integers(0, 2), st.just((0.5, 0.25, 0.25)), st.sampled_from(["random", "time"]), st.integers(0, 9)
)


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, in type, form and order of keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | np.ndarray):
        if isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16:
            return False
        raw: list[np.ndarray[Any, Any]] = [v.numpy() if isinstance(v, torch.Tensor) else v for v in (one, other)]
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and raw[0].tobytes() == raw[1].tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def call_of(shared: Any, clients: Any, key: int, settle: Settle | None = None) -> Call:
    values = {"shared": shared, "own": None, "clients": clients, "key": key, "next_clients": None, "rows": clients}
    return Call("train", {**values, "number": 3, "transform_state": {"bound": 0.1}}, settle)


@given(TREE, INTS, NUMBERS, st.none() | INTS)
def test_a_call_comes_back_as_it_was(shared: Any, clients: Any, key: int, used: Any) -> None:
    call = call_of(shared, clients, key, Settle(key + 1, used))
    found = decode_call(encode_call(call))
    assert same(found.values, call.values)
    assert found.settle is not None
    assert (found.operation, found.settle.key) == ("train", key + 1)
    assert same(found.settle.used, used)
    assert decode_call(encode_call(call_of(shared, clients, key))).settle is None


@given(PARTS, PARTS, st.booleans())
def test_of_rows_travels_which_they_are(support: Part, part: Part, odd: bool) -> None:
    none: Any = None
    nobody = np.arange(4)
    half, query = Half(none, nobody, part, odd), Query(none, nobody, part)
    parts = {"validation": Validation(none, nobody, part), "half": half, "query": query}
    values = {"shared": {}, "own": None, "clients": nobody, "rows": None, "key": 1, "by_row": ""}
    call = Call("examine", {**values, "support": Support(none, nobody, support), "parts": parts})
    found = decode_call(encode_call(call)).values
    assert (type(found["support"]), found["support"].part) == (Support, support)
    assert [(type(rows), rows.part) for rows in found["parts"].values()] == [(type(r), r.part) for r in parts.values()]
    assert found["parts"]["half"].odd == odd
    assert not len(found["support"].clients)  # whose they are is known where they lie


@given(TREE, TREE, st.lists(st.integers(0, 99), max_size=4), st.integers(0, 10**12))
def test_a_partial_sum_travels_without_norms_of_single_clients(
    sums: Any, each: Any, clients: list[int], many: int
) -> None:
    said = Partial(sums, each, [each], clients, [7], [0.5] * len(clients), many, 4, 5)
    found = decode_answer(encode_answer("train", said), "train")
    assert same(found.sums, sums)
    assert same(found.each, each)
    assert (found.clients, found.excluded, found.steps, found.examples, found.bytes_up) == (clients, [7], many, 4, 5)
    assert (found.norms, found.pieces) == ([], [])


@given(arrays.arrays(np.float64, (3, 2)), st.binary(max_size=9), NAMES)
def test_other_answers_come_back(values: Any, message: bytes, text: str) -> None:
    for operation, answer in {
        "examine": {"query": {"loss": values, "count": values[:, :1].copy()}},
        "secure": ({3: message, 1: [("a/b", [2, 3], torch.float64)]}, text),
        "save_private": [text, "b"],
        "template": {"params": {"w": torch.zeros(2, dtype=torch.int64)}},
        "answer": None,
        "open": None,
    }.items():
        assert same(decode_answer(encode_answer(operation, answer), operation), answer), operation
    half = torch.randn(3).bfloat16()
    assert torch.equal(decode_answer(encode_answer("template", {"w": half}), "template")["w"], half)


@given(st.lists(st.text(max_size=4), max_size=4, unique=True), st.booleans())
def test_a_roster_comes_back(ids: list[str], grouped: bool) -> None:
    group = np.arange(len(ids)) % 2 if grouped else None
    roster = Roster(ids, client_keys(ids), np.arange(len(ids)), group, ("a", "b") if grouped else ())
    found = decode_answer(encode_answer("hello", roster), "hello")
    assert (found.ids, list(found.groups)) == (ids, list(roster.groups))
    for name in ("keys", "sizes", "group"):
        assert same(getattr(found, name), getattr(roster, name))


def test_an_opening_comes_back() -> None:
    opening = Opening(
        {"seed": 3, "stage": [{"lr": 1e-300, "lrs": [0.1, 2]}]}, 1, {"bound": math.inf}, {"w": torch.ones(1)}
    )
    found = decode_call(encode_call(Call("open", {"work": opening, "params": {}}))).values["work"]
    assert (found.config, found.stage, found.noise) == (opening.config, opening.stage, opening.noise)
    assert same(found.sample, opening.sample)


def test_errors_travel_as_their_text_and_bugs_by_name() -> None:
    for raised, expected, text in (
        (UserError("k is 0"), UserError, "k is 0"),
        (RemoteLost("gone"), RemoteLost, "gone"),
        (ValueError("the row of client 7 is 3.5"), WorkerFailed, "ValueError; the log of that place says more"),
    ):
        with pytest.raises(expected) as found:
            decode_answer(encode_answer("train", raised), "train")
        assert str(found.value) == text
        assert type(found.value) is expected


# -- what is refused ---------------------------------------------------------------------------------------------------
MESSAGE = encode_call(call_of({"params": {"w": torch.arange(6.0).reshape(2, 3)}}, np.array([1, 2]), 5))


def refused(data: bytes, why: str | None = None, **how: Any) -> None:
    with pytest.raises(WireError, match=why):
        decode_call(data, **how)


@given(st.integers(0, len(MESSAGE) - 1))
def test_a_message_that_was_cut_short_is_refused(length: int) -> None:
    refused(MESSAGE[:length])


@given(st.integers(0, len(MESSAGE) - 1), st.integers(1, 255))
def test_a_message_of_which_a_byte_is_another_is_refused(place: int, change: int) -> None:
    refused(MESSAGE[:place] + bytes([MESSAGE[place] ^ change]) + MESSAGE[place + 1 :])


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    refused(data)
    refused(wire.MAGIC + data)


def test_what_is_too_large_is_refused_on_both_sides() -> None:
    said = f"{len(MESSAGE):,}"
    refused(MESSAGE, f"a message of {said} bytes was refused: the limit is 100", limit=100)
    with pytest.raises(WireError, match=f"train has {said} bytes, and the limit of a message is 100; raise the limit"):
        encode_call(decode_call(MESSAGE), limit=100)
    assert decode_call(MESSAGE, limit=len(MESSAGE)).operation == "train"


def test_another_version_is_refused() -> None:
    refused(MESSAGE[:4] + b"\x02\x00" + MESSAGE[6:], "version 2, and this is version 1; use the same release")


def forged(header: Any, **tensors: torch.Tensor) -> bytes:
    """A message with a right digest, whatever it says: of a program that is not ours."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    arrays_ = wire.save(tensors)
    begin, rest = wire.MAGIC + b"\x01\x00", len(text).to_bytes(8, "little")
    return b"".join([begin, wire._digest(begin, rest, text, arrays_), rest, text, arrays_])


def test_a_forged_header_is_refused() -> None:
    """Every way in which a message can say what no operation takes."""
    settle = {"call": "settle", "values": {"tree": {}}, "settle": None}
    assert decode_call(forged(settle)).operation == "settle"
    refused(forged({**settle, "call": "shell"}), "unknown operation 'shell'; known: hello")
    refused(forged({**settle, "call": "__class__"}), "unknown operation")
    refused(forged({**settle, "call": ["settle"]}), "unknown operation")
    refused(forged({**settle, "values": {"tree": {"path": "/etc"}}}), "settle takes no values")
    refused(forged({**settle, "settle": [1]}), "not a round's key")
    refused(forged({**settle, "settle": ["1", None]}), "not of the kind 'number'")
    refused(forged({**settle, "call": "kept_layers"}), "kept_layers takes point")
    refused(forged({"call": "kept_layers", "values": {"tree": {"point": 3}}, "settle": None}), "not of the kind 'text'")
    refused(forged({"call": "hello", "values": {"tree": {}, "more": 1}, "settle": None}), "and another key")
    refused(forged({"call": "hello", "values": {"object": "os.system"}, "settle": None}), "'object'")
    refused(forged({"call": "hello", "values": {"tensor": "0"}, "settle": None}), "cannot be read")
    refused(forged(settle, spare=torch.zeros(1)), "holds 1 arrays that its header does not name")
    refused(forged(b'{"call": ' + b"[" * 100_000), "cannot be read")
    deep: Any = {"tree": {}}
    for _ in range(60):
        deep = {"tree": {"a": deep}}
    refused(forged({**settle, "values": deep}), "40 trees")
    refused(forged(b"[]"), "cannot be read")
    refused(forged(b"\xff"), "cannot be read")
    part = {"tree": {"index": 0, "fractions": {"tuple": [1.0]}, "order": "random", "seed": 0, "time": "time"}}
    refused(forged({"call": "move", "values": {"tree": {"train": {"rows": ["Path", part, False]}}}, "settle": None}))
    assert "move" in OPERATIONS


def test_an_answer_to_something_else_is_refused() -> None:
    with pytest.raises(WireError, match="not an answer to train: it is one to 'template'"):
        decode_answer(encode_answer("template", {}), "train")
    with pytest.raises(WireError, match=r"the answer to train is not of the kind 'partial' \(it is a dict\)"):
        decode_answer(encode_answer("train", {}), "train")
    roster = Roster(["a"], client_keys(["a"]), np.array([1, 2]))
    with pytest.raises(WireError, match="belong to different clients"):
        decode_answer(encode_answer("hello", roster), "hello")


def test_what_has_no_plain_form_does_not_travel() -> None:
    with pytest.raises(TypeError, match="a function does not travel"):
        encode_call(call_of({"params": lambda: 1}, np.array([1]), 1))
    assert Train is not Support
