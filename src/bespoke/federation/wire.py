"""Calls and answers as bytes, between machines: a header in JSON, and arrays as safetensors. Nothing is unpickled.

    "BSPK" | version (2) | digest (16) | length of the header (8) | header | arrays

In the header an object has one key, which names its kind: {"tree": {...}}, {"tensor": "0"}. The digest detects damage.
The transport decides who may send.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from bespoke.data.population import Population
from bespoke.data.splits import Half, Part, Query, Rows, Support, Train, Validation
from bespoke.errors import RemoteLost, UserError, WorkerFailed
from bespoke.federation.calls import OPERATIONS, Call, Settle
from bespoke.federation.opening import Opening
from bespoke.federation.partial import Partial
from bespoke.federation.roster import Roster
from bespoke.plain import JsonObject
from bespoke.storage import apart

MAGIC, VERSION = b"BSPK", 1
HEAD = len(MAGIC) + 2 + 16 + 8
LIMIT = 2**30  # default limit of a message, in bytes
DEEPEST = 40  # trees within trees
COUNTS = ("steps", "examples", "bytes_up")  # of a partial sum; norms of single clients' changes do not travel
ROWS = {kind.__name__: kind for kind in (Train, Support, Validation, Half, Query)}


class WireError(UserError):
    """A message that is not valid, and is refused whatever its content."""


# -- messages ----------------------------------------------------------------------------------------------------------
def encode_call(call: Call, limit: int = LIMIT) -> bytes:
    settle = None if call.settle is None else [call.settle.key, call.settle.used]
    return _sealed({"call": call.operation, "values": call.values, "settle": settle}, limit, call.operation)


def decode_call(data: bytes, limit: int = LIMIT) -> Call:
    content = _opened(data, limit)
    operation, values, settle = content.get("call"), content.get("values"), content.get("settle")
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise WireError(f"unknown operation {operation!r}; known: {', '.join(OPERATIONS)}")
    kinds = OPERATIONS[operation]
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise WireError(f"{operation} takes {', '.join(kinds) or 'no values'}; the message has other values")
    for name, kind in kinds.items():
        _check(values[name], kind, f"{operation}: {name}")
    if settle is not None:
        if not isinstance(settle, list) or len(settle) != 2:
            raise WireError(f"{operation}: settle is not a round's key and its clients")
        _check(settle[0], "number", f"{operation}: settle")
        _check(settle[1], "clients?", f"{operation}: settle")
        settle = Settle(settle[0], settle[1])
    return Call(operation, values, settle)


def encode_answer(operation: str, answer: Any, limit: int = LIMIT) -> bytes:
    """An answer to an operation, or the error instead of it.

    A user's mistake travels as text. Of any other exception only the class name travels, because its text may hold
    rows.
    """
    if isinstance(answer, UserError | RemoteLost):
        content = {"refused" if isinstance(answer, UserError) else "lost": str(answer)}
    elif isinstance(answer, BaseException):
        content = {"failed": f"{type(answer).__name__}; the log of that place says more"}
    else:
        content = {"value": answer}
    return _sealed({"answer": operation, **content}, limit, f"the answer to {operation}")


def decode_answer(data: bytes, operation: str, limit: int = LIMIT) -> Any:
    """The answer to this operation. If the operation raised an error there, raises it here."""
    content = _opened(data, limit)
    for outcome, error in (("refused", UserError), ("lost", RemoteLost), ("failed", WorkerFailed)):
        if isinstance(content.get(outcome), str):
            raise error(content[outcome])
    if content.get("answer") != operation:
        raise WireError(f"this is not an answer to {operation}: it is one to {content.get('answer')!r}")
    if "value" not in content:
        raise WireError(f"the answer to {operation} has no value")
    _check(content["value"], ANSWERS.get(operation, "nothing"), f"the answer to {operation}")
    return content["value"]


def bound(value: Any, population: Population) -> Any:
    """Replaces the rows of values that came over the wire by this place's own rows."""
    if isinstance(value, Rows):
        mine = replace(value, population=population)
        return replace(mine, clients=np.flatnonzero(mine.sizes(np.arange(len(population)))))
    return {name: bound(entry, population) for name, entry in value.items()} if isinstance(value, dict) else value


# -- bytes -------------------------------------------------------------------------------------------------------------
def _sealed(content: JsonObject, limit: int, what: str) -> bytes:
    packer = _Packer()
    header = json.dumps({name: packer.down(value) for name, value in content.items()}, allow_nan=False).encode()
    arrays = save(apart(packer.arrays))
    size = HEAD + len(header) + len(arrays)
    if size > limit:
        raise WireError(f"{what} has {size:,} bytes, and the limit of a message is {limit:,}; raise the limit")
    rest = len(header).to_bytes(8, "little")
    begin = MAGIC + VERSION.to_bytes(2, "little")
    return b"".join([begin, _digest(begin, rest, header, arrays), rest, header, arrays])


def _opened(data: bytes, limit: int) -> JsonObject:
    if len(data) > limit:
        raise WireError(f"a message of {len(data):,} bytes was refused: the limit is {limit:,}; raise the limit")
    view = memoryview(data)
    if len(data) < HEAD or view[:4] != MAGIC:
        raise WireError("this is not a message of bespoke, or it was cut short")
    version = int.from_bytes(view[4:6], "little")
    if version != VERSION:
        raise WireError(f"the message has version {version}, and this is version {VERSION}; use the same release")
    length = int.from_bytes(view[22:30], "little")
    if length > len(data) - HEAD:
        raise WireError("the message was cut short")
    header, arrays = bytes(view[HEAD : HEAD + length]), bytes(view[HEAD + length :])
    if _digest(view[:6], view[22:30], header, arrays) != view[6:22]:
        raise WireError("the message was damaged on its way: its digest does not match")
    try:
        content = json.loads(header)
        unpacker = _Unpacker(load(arrays))
        opened = {str(name): unpacker.up(value) for name, value in content.items()}
        unpacker.done()
        return opened
    except WireError:
        raise
    except (
        ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, RuntimeError,
        SafetensorError,
    ) as error:  # fmt: skip
        raise WireError(f"the message cannot be read ({type(error).__name__}: {error})") from None


def _digest(*parts: bytes | memoryview) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


# -- values ------------------------------------------------------------------------------------------------------------
@dataclass
class _Packer:
    """Turns values into JSON, and collects the arrays among them."""

    arrays: dict[str, torch.Tensor] = field(default_factory=dict)

    def down(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | np.integer):
            return int(value)
        if isinstance(value, float | np.floating):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._kept(value.detach().cpu())}
        if isinstance(value, np.ndarray):
            keys = value.dtype == np.uint64  # not every version of safetensors supports uint64
            array = np.ascontiguousarray(value.view(np.int64) if keys else value).reshape(value.shape)
            return {"keys" if keys else "array": self._kept(torch.from_numpy(array.copy()))}
        if isinstance(value, bytes):
            return {"bytes": self._kept(torch.from_numpy(np.frombuffer(value, np.uint8).copy()))}
        if isinstance(value, dict):
            if all(isinstance(name, str) for name in value):
                return {"tree": {name: self.down(entry) for name, entry in value.items()}}
            return {"numbered": [[int(name), self.down(entry)] for name, entry in value.items()]}
        if isinstance(value, list):
            return [self.down(entry) for entry in value]
        if isinstance(value, tuple):
            return {"tuple": [self.down(entry) for entry in value]}
        return self._ours(value)

    def _ours(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, Rows):
            part = {entry.name: getattr(value.part, entry.name) for entry in fields(Part)}
            return {"rows": [type(value).__name__, self.down(part), bool(getattr(value, "odd", False))]}
        if isinstance(value, Partial):
            counts = {name: getattr(value, name) for name in ("sums", "each", *COUNTS)}
            who = {name: np.array(getattr(value, name), np.int64) for name in ("clients", "excluded")}
            return {"partial": self.down({**counts, **who})}
        if isinstance(value, Roster):
            values = {entry.name: getattr(value, entry.name) for entry in fields(Roster)}
            return {"roster": self.down({**values, "ids": list(value.ids), "groups": list(value.groups)})}
        if isinstance(value, Opening):
            return {"opening": self.down({entry.name: getattr(value, entry.name) for entry in fields(Opening)})}
        raise TypeError(f"a {type(value).__name__} does not travel between machines")

    def _kept(self, array: torch.Tensor) -> str:
        name = str(len(self.arrays))
        self.arrays[name] = array
        return name


@dataclass
class _Unpacker:
    """Turns JSON and arrays into values. Every array is used once."""

    arrays: dict[str, torch.Tensor]

    def up(self, value: Any, depth: int = 0) -> Any:
        if depth > DEEPEST:
            raise WireError(f"the message has more than {DEEPEST} trees within each other")
        if isinstance(value, list):
            return [self.up(entry, depth + 1) for entry in value]
        if not isinstance(value, dict):
            return value
        kind, *rest = value
        inner = value[kind]
        if rest:
            raise WireError(f"the message has {kind!r} and another key in one object")
        if kind == "tree":
            return {name: self.up(entry, depth + 1) for name, entry in inner.items()}
        if kind == "numbered":
            return {int(name): self.up(entry, depth + 1) for name, entry in inner}
        if kind == "tuple":
            return tuple(self.up(entry, depth + 1) for entry in inner)
        if kind == "tensor":
            return self.arrays.pop(inner)
        if kind in ("array", "keys"):
            array = self.arrays.pop(inner).numpy()
            return array.view(np.uint64) if kind == "keys" else array
        if kind == "bytes":
            return self.arrays.pop(inner).numpy().tobytes()
        if kind == "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
        return self._ours(kind, inner, depth)

    def _ours(self, kind: str, inner: Any, depth: int) -> Any:
        if kind == "dtype":
            found = getattr(torch, inner)
            if not isinstance(found, torch.dtype):
                raise WireError(f"{inner!r} is no type of numbers")
            return found
        if kind == "rows":
            name, part, odd = inner
            made = Part(**self.up(part, depth + 1))
            none: Any = None
            rows = ROWS[name]
            return rows(none, np.zeros(0, np.int64), made, **({"odd": bool(odd)} if rows is Half else {}))
        found = self.up(inner, depth + 1)
        if kind == "partial":
            _check(found["clients"], "clients", "a partial sum's clients")
            _check(found["excluded"], "clients", "a partial sum's excluded clients")
            _check(found["sums"], "tree?", "a partial sum's sums")
            _check(found["each"], "tree", "what a partial sum has of each client")
            for name in COUNTS:
                _check(found[name], "number", f"a partial sum's {name}")
            who = {name: found.pop(name).tolist() for name in ("clients", "excluded")}
            return Partial(**who, **{name: found[name] for name in ("sums", "each", *COUNTS)})
        if kind == "roster":
            return _roster(found)
        if kind == "opening":
            _check(found["config"], "plain", "an opening's experiment")
            _check(found["sample"], "tree", "an opening's sample")
            _check(found["learned"], "plain?", "what an opening says of the data")
            return Opening(**found)
        raise WireError(f"the message holds a {kind!r}, which is not a known kind")

    def done(self) -> None:
        if self.arrays:
            raise WireError(f"the message holds {len(self.arrays)} arrays that its header does not name")


def _roster(found: JsonObject) -> Roster:
    roster = Roster(**found)
    _check(roster.ids, "texts", "a roster's ids")
    _check(roster.groups, "texts", "a roster's groups")
    _check(roster.sizes, "clients", "a roster's sizes")
    _check(roster.group, "clients?", "a roster's group")
    alike = {len(roster.ids), len(roster.keys), len(roster.sizes)}
    grouped = roster.group is not None
    if len(alike) > 1 or (grouped and len(roster.group) != len(roster.ids)) or (roster.sizes < 0).any():  # type: ignore[arg-type]
        raise WireError("a roster's ids, keys, sizes and groups belong to different clients")
    if grouped and len(roster.ids) and not 0 <= roster.group.min() <= roster.group.max() < len(roster.groups):  # type: ignore[union-attr]
        raise WireError("a roster's clients belong to groups that it does not name")
    return roster


# -- what a value may be -----------------------------------------------------------------------------------------------
def _is_tree(value: Any) -> bool:
    """A tree of tensors; numbers may stand for tensors of one element."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_tree(entry) for name, entry in value.items())
    return isinstance(value, torch.Tensor | bool | int | float)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(entry) for name, entry in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _is_scores(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else [None]
    tables = [table for part in parts for table in (part.values() if isinstance(part, dict) else [None])]
    return all(isinstance(table, np.ndarray) and table.ndim == 2 for table in tables)


def _all_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "nothing": lambda v: v is None,
    "tree": lambda v: isinstance(v, dict) and _is_tree(v),
    "plain": lambda v: isinstance(v, dict) and _is_plain(v),
    "clients": lambda v: isinstance(v, np.ndarray) and v.dtype == np.int64 and v.ndim == 1,
    "number": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "flag": lambda v: isinstance(v, bool),
    "text": lambda v: isinstance(v, str),
    "texts": lambda v: _all_of(v, str),
    "pair": lambda v: isinstance(v, tuple) and len(v) == 2 and all(isinstance(n, int) for n in v),
    "rows": lambda v: isinstance(v, Rows),
    "parts": lambda v: isinstance(v, dict) and all(isinstance(rows, Rows) for rows in v.values()),
    "by client": lambda v: isinstance(v, dict) and (not v or all(isinstance(client, int) for client in v)),
    "opening": lambda v: isinstance(v, Opening),
    "roster": lambda v: isinstance(v, Roster),
    "partial": lambda v: isinstance(v, Partial),
    "scores": _is_scores,
    "secure": lambda v: isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], dict) and isinstance(v[1], str),
}
ANSWERS = {
    "hello": "roster", "moments": "tree", "template": "tree", "train": "partial", "answer": "tree?", "secure": "secure",
    "examine": "scores", "personal": "tree", "save_private": "texts", "kept_layers": "texts", "describe": "plain",
    "statistics": "plain", "keep": "plain",
}  # fmt: skip


def _check(value: Any, kind: str, where: str) -> None:
    if kind.endswith("?") and value is None:
        return
    if not _KINDS[kind.rstrip("?")](value):
        raise WireError(f"{where} is not of the kind {kind.rstrip('?')!r} (it is a {type(value).__name__})")
