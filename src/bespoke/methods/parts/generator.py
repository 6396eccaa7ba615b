"""FedPC's generator of embeddings: one decoder block that reads texts (Silva et al., FedPC, 2022, Appendix A).

The embedding e asks, the words W of a text answer (LN: layer normalization, FFN: a layer of GELUs and a linear one):

    a  = attention(query LN(e), keys W, values W)
    h  = LN(LN(a) + LN(e))
    e' = LN(FFN(h) + LN(e))

`reads` says what a step is. `utterance`: W are the words of the next text, and e' takes the place of e. `token`, the
paper's form: W are the words of a text up to the next one, and e' takes the place of e. `history`: W are the words of
all texts so far, and e stays the first one; sums over words are all that is carried from text to text.

A generator serves a table of embeddings, a row for each context; a text is read for the row that it belongs to.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.tensors import Params, Tree, add, stack

Reads = Literal["utterance", "token", "history"]
STEEPEST = 20.0  # logits of attention over all texts are kept within this: their exponentials are added up as they come


def generator_start(width: int, words: int, heads: int, hidden: int, draw: torch.Generator) -> Params:
    """A random block for embeddings of this width and words of that. Its gain is zero: at first it adds nothing."""
    inner = heads * -(-width // heads)

    def drawn(rows: int, columns: int) -> Tensor:
        entries: Tensor = torch.randn(rows, columns, generator=draw) * columns**-0.5
        return entries

    return {
        "query": drawn(inner, width), "key": drawn(inner, words), "value": drawn(inner, words),
        "out": drawn(width, inner), "inner": drawn(hidden, width), "inner_bias": torch.zeros(hidden),
        "outer": drawn(width, hidden), "outer_bias": torch.zeros(width), "gain": torch.zeros(width),
    }  # fmt: skip


def nothing_read(first: Tensor, heads: int, reads: Reads) -> Tree:
    """What is carried from text to text before the first one; `first`: (rows, tokens, width)."""
    rows, tokens, width = first.shape
    if reads != "history":
        return {"state": first, "texts": torch.zeros(rows)}
    sums = torch.zeros(rows, tokens, heads, -(-width // heads))
    return {"values": sums, "weights": torch.zeros_like(sums[..., :1]), "texts": torch.zeros(rows)}


def read(
    block: Params, first: Tensor, carried: Tree, words: Tensor, counted: Tensor, row: Tensor, heads: int, reads: Reads
) -> tuple[Tree, Tree]:
    """(what was carried before each text, what is carried after the last one).

    words: (texts, words, width), of which `counted` are there; row: (texts,), what each text is read for.
    """
    keys, values = ((words @ block[name].mT).unflatten(-1, (heads, -1)) for name in ("key", "value"))
    own = (row[:, None] == torch.arange(len(first))).to(words.dtype)  # (texts, rows): 1 where a text belongs
    if reads == "history":
        return _all_read(block, first, carried, keys, values, counted, own)
    return _next_read(block, carried, keys, values, counted, own, reads == "token")


def _all_read(
    block: Params, first: Tensor, carried: Tree, keys: Tensor, values: Tensor, counted: Tensor, own: Tensor
) -> tuple[Tree, Tree]:
    """Attention over all texts so far is a quotient of sums over texts."""
    logits = _logits(block, torch.tensordot(own, first, 1), keys).clamp(-STEEPEST, STEEPEST)
    weights = logits.exp() * counted[:, None, None]
    said = {"values": torch.einsum("tqhw,twhd->tqhd", weights, values), "weights": weights.sum(-1, keepdim=True)}
    said["texts"] = counted.amax(1)
    earlier = (own @ own.mT).tril(-1)  # 1 for each text before this one that belongs to the same row

    def summed(which: Tensor, leaves: Tree) -> Tree:
        return {name: torch.tensordot(which, leaves[name], 1) for name in said}

    return add(summed(own, carried), summed(earlier, said)), add(carried, summed(own.mT, said))


def _next_read(
    block: Params, carried: Tree, keys: Tensor, values: Tensor, counted: Tensor, own: Tensor, by_word: bool
) -> tuple[Tree, Tree]:
    """One text after the other, the words of a text together or one by one."""
    state, texts, before = carried["state"], carried["texts"], []
    length = torch.arange(counted.shape[1])
    for mine, key, value, there in zip(own, keys, values, counted):
        e = known = torch.tensordot(mine, state, 1)
        before.append({"state": known, "texts": mine @ texts})
        # for each step the words that are read, and whether it is one: texts and words may be padding
        steps = [(there * (length <= t), there[t]) for t in range(len(length))] if by_word else [(there, there.amax())]
        for seen, live in steps:
            logits = _logits(block, e, key).masked_fill(seen == 0, -torch.inf).masked_fill(seen.amax() == 0, 0.0)
            attended = torch.einsum("qhw,whd->qhd", logits.softmax(-1), value)
            e = e + live * (_finished(block, attended, e) - e)
        state = state + mine[:, None, None] * (e - known)
        texts = texts + mine * there.amax()
    return stack(before), {"state": state, "texts": texts}


def generated(block: Params, first: Tensor, carried: Tree) -> Tensor:
    """What is added to embeddings for what was read: nothing where nothing was."""
    texts = carried["texts"]
    if "state" in carried:
        share, e = (texts > 0).to(first.dtype), carried["state"]
    else:  # the more texts there are, the more they count against what is known without them
        share = texts / (texts + block["prior"].exp())
        e = _finished(block, carried["values"] / carried["weights"].clamp(min=torch.finfo().tiny), first)
    embeddings: Tensor = share[:, None, None] * block["gain"] * e
    return embeddings


def _logits(block: Params, e: Tensor, keys: Tensor) -> Tensor:
    """How much each head of each query looks at each word: (..., tokens, heads, words)."""
    query = (_normal(e) @ block["query"].mT).unflatten(-1, keys.shape[-2:])
    logits: Tensor = torch.einsum("...qhd,...whd->...qhw", query, keys) * keys.shape[-1] ** -0.5
    return logits


def _finished(block: Params, attended: Tensor, e: Tensor) -> Tensor:
    """The rest of the block after its attention."""
    residual = _normal(e)
    h = _normal(_normal(attended.flatten(-2) @ block["out"].mT) + residual)
    inner = F.gelu(h @ block["inner"].mT + block["inner_bias"])
    return _normal(inner @ block["outer"].mT + block["outer_bias"] + residual)


def _normal(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])
