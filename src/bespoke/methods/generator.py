"""A generator of embeddings: one decoder block that reads texts (Silva et al., FedPC, 2022, Appendix A).

The embedding e asks, the words W of a text answer (LN: layer normalization):

    a  = attention(query LN(e), keys W, values W)
    h  = LN(LN(a) + LN(e))
    e' = LN(FFN(h) + LN(e))

`reads` says what a step is: all words of the next text (`utterance`: e' takes the place of e), the words of a text up to
the next one (`token`, the paper's form), or the words of all texts so far (`history`: e stays the first one, and only
sums over words are carried from text to text). Several tables of embeddings are read for at once, one for each context:
a text is read for the one that `place` names.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.tensors import Params, Tree

Reads = Literal["utterance", "token", "history"]
STEEPEST = 20.0  # attention's logits are kept within this, so that their exponentials can be added up as they come


def generator_start(width: int, words: int, heads: int, hidden: int, draw: torch.Generator) -> Params:
    """A random block for embeddings of this width and words of that; its gain is zero: nothing is added at first."""
    inner = heads * -(-width // heads)

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * columns**-0.5

    return {
        "query": drawn(inner, width), "key": drawn(inner, words), "value": drawn(inner, words),
        "out": drawn(width, inner), "inner": drawn(hidden, width), "inner_bias": torch.zeros(hidden),
        "outer": drawn(width, hidden), "outer_bias": torch.zeros(width), "gain": torch.zeros(width),
    }  # fmt: skip


def nothing_read(first: Tensor, heads: int, reads: Reads) -> Tree:
    """What is carried from text to text before the first one; `first`: (tables, tokens, width)."""
    tables, tokens, width = first.shape
    if reads != "history":
        return {"state": first, "texts": torch.zeros(tables)}
    sums = torch.zeros(tables, tokens, heads, -(-width // heads))
    return {"values": sums, "weights": torch.zeros_like(sums[..., :1]), "texts": torch.zeros(tables)}


def read(
    block: Params, first: Tensor, carried: Tree, words: Tensor, counted: Tensor, place: Tensor, heads: int, reads: Reads
) -> tuple[Tree, Tree]:
    """(what was carried before each text, what is carried after the last one).

    words: (texts, words, width), of which `counted` are there; place: (texts,), the table that each is read for.
    """
    keys, values = ((words @ block[name].mT).unflatten(-1, (heads, -1)) for name in ("key", "value"))
    own = (place[:, None] == torch.arange(len(first))).to(words.dtype)  # (texts, tables)
    there = counted.amax(1)
    if reads == "history":
        logits = _logits(block, torch.tensordot(own, first, 1), keys)  # each text is asked by the table it is read for
        weights = logits.clamp(-STEEPEST, STEEPEST).exp() * counted[:, None, None]
        sums = torch.einsum("rqhw,rwhd->rqhd", weights, values)
        said = {"values": sums, "weights": weights.sum(-1)[..., None], "texts": there}
        earlier = (own @ own.mT).tril(-1)  # [text j is before text i, and of the same table]
        before = {name: torch.tensordot(own, carried[name], 1) + torch.tensordot(earlier, said[name], 1) for name in said}
        return before, {name: carried[name] + torch.tensordot(own.mT, said[name], 1) for name in said}
    state, texts, states, numbers = carried["state"], carried["texts"], [], []
    for row in range(len(words)):
        mine = own[row]
        e = torch.tensordot(mine, state, 1)
        states.append(e)
        numbers.append(mine @ texts)
        # the words that each step of the generator reads, and whether the step is one
        steps = [(counted[row], there[row])]
        if reads == "token":
            whole = torch.arange(words.shape[1])
            steps = [(counted[row] * (whole <= t), counted[row, t]) for t in range(len(whole))]
        for seen, live in steps:
            logits = _logits(block, e, keys[row]).masked_fill(seen[None, None] == 0, -torch.inf)
            weights = logits.masked_fill(seen.amax() == 0, 0.0).softmax(-1)
            attended = torch.einsum("qhw,whd->qhd", weights, values[row])
            e = e + live * (_finished(block, attended, e) - e)
        state = state + mine[:, None, None] * (e - states[-1])
        texts = texts + mine * there[row]
    return {"state": torch.stack(states), "texts": torch.stack(numbers)}, {"state": state, "texts": texts}


def generated(block: Params, first: Tensor, carried: Tree) -> Tensor:
    """What is added to the embedding for what was read: nothing where nothing was."""
    if "state" in carried:
        share, e = (carried["texts"] > 0).to(first.dtype), carried["state"]
    else:  # the more texts, the more they count against what is known without them
        share = carried["texts"] / (carried["texts"] + block["prior"].exp())
        e = _finished(block, carried["values"] / carried["weights"].clamp(min=torch.finfo().tiny), first)
    return share[:, None, None] * block["gain"] * e


def _logits(block: Params, e: Tensor, keys: Tensor) -> Tensor:
    """How much each head of each query looks at each word: (..., tokens, heads, words)."""
    heads, size = keys.shape[-2:]
    query = (_normal(e) @ block["query"].mT).unflatten(-1, (heads, size))
    return torch.einsum("...qhd,...whd->...qhw", query, keys) * size**-0.5


def _finished(block: Params, attended: Tensor, e: Tensor) -> Tensor:
    """The rest of the block after its attention."""
    residual = _normal(e)
    h = _normal(_normal(attended.flatten(-2) @ block["out"].mT) + residual)
    inner = F.gelu(h @ block["inner"].mT + block["inner_bias"])
    return _normal(inner @ block["outer"].mT + block["outer_bias"] + residual)


def _normal(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])
