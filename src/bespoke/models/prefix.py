"""The task of a frozen language model with a learned prefix: embeddings that precede every text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke import pretrained
from bespoke.data.about import About
from bespoke.errors import UserError, unknown
from bespoke.models.fast.token_loss import head_words
from bespoke.models.frozen import NOTHING, FrozenLM
from bespoke.models.language import LanguageModel
from bespoke.models.scores import RAREST, cut
from bespoke.models.task import ROOM
from bespoke.plain import Knobs
from bespoke.tensors import Params


@dataclass(frozen=True)
class PrefixLM(LanguageModel):
    """The next token of texts after a prefix; `prefix` has a row for each context (a batch's `context`), or one.

    All tokens are learned; the first `given` of a text are a prompt and are not scored.
    """

    network: FrozenLM
    padding: int = NOTHING
    contexts: int = 1
    given: int = 3
    metrics: tuple[str, ...] = ("perplexity", "loss", "accuracy")

    batches_clients = True  # rows of many clients are computed in one batch, without padding

    def with_head(self) -> PrefixLM:
        """The task of the same model with a learned last layer instead of a prefix."""
        from bespoke.models.head import HeadLM

        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return HeadLM(**own)

    def prefix(self, params: Params, batch: Params) -> Tensor:
        """The prefix of each row: (rows, tokens, width)."""
        table = params["prefix"]
        if len(table) == 1 or "context" not in batch:
            return table[0].expand(batch["x"].shape[0], *table.shape[1:])
        return table[batch["context"].long()]

    def scored_rows(self, batch: Params) -> Params:
        """The same rows without the given targets."""
        given = torch.arange(batch["y"].shape[-1]) < self.given
        return {**batch, "y": torch.where(given, self.padding, batch["y"])}

    def _targets(self, batch: Params) -> Tensor:
        return torch.where(self._tokens(batch) > 0, batch["y"].long(), NOTHING)

    def loss(self, params: Params, batch: Params) -> Tensor:
        return self._penalized(self._mean_loss(self.prefix(params, batch), batch), params)

    def loss_of_rows(self, params: Params, batch: Params) -> Tensor:
        share = batch["mask"] / batch["mask"].sum().clamp(min=1.0)
        weighted = {"prefix": share.sqrt()[:, None, None] * params["prefix"]}  # the penalty is the mean of the rows'
        return self._penalized(self._mean_loss(params["prefix"], batch), weighted)

    def _mean_loss(self, prefix: Tensor, batch: Params) -> Tensor:
        rows = self.network.row_losses(prefix, batch["x"], self._targets(batch))
        return rows.sum() / self._tokens(batch).sum().clamp(min=1.0)

    @property
    def word_width(self) -> int:
        return self.network.width

    def words(self, batch: Params) -> tuple[Tensor, Tensor]:
        """The embeddings of a text's words, each of mean zero and variance one."""
        found = self.network.words(batch["y"].long().clamp(min=0))
        return F.layer_norm(found, found.shape[-1:]), self._tokens(batch)

    def features(self, params: Params, batch: Params) -> Tensor:
        return self.network.hidden(self.prefix(params, batch), batch["x"])

    def predict(self, params: Params, batch: Params) -> Tensor:
        return self.network.logits(self.features(params, batch))

    # -- a memory of tokens (kNN-Per): distributions over all words are not written down -------------------------------
    def seen(self, params: Params, batch: Params, targets: Tensor) -> Tensor:
        """The representation where there is a target."""
        return self.network.seen(batch["x"], targets, self.prefix(params, batch))

    def items(self, params: Params, batch: Params) -> tuple[Tensor, Tensor, Tensor]:
        if self.how != "autograd":  # under vmap every client has its own padding
            features, words, counted = super().items(params, batch)
            return features, words.clamp(min=0), counted
        targets = self._targets(batch)
        counted = targets != NOTHING
        return self.seen(params, batch, targets)[counted], targets[counted], torch.ones(int(counted.sum()))

    def asked(self, params: Params, batch: Params) -> tuple[Any, Tensor]:
        if self.how != "autograd" or "y" not in batch:
            return super().asked(params, batch)
        targets = self._targets(self.scored_rows(batch))
        features = self.seen(params, batch, targets)[targets != NOTHING]
        return {"targets": targets, "features": features}, features

    def vote(self, outputs: Any, targets: Tensor, weights: Tensor) -> Any:
        """The neighbours' words and weights, with the model's probabilities of these words and of the target."""
        if not isinstance(outputs, dict):
            return super().vote(outputs, targets, weights)
        own = outputs["targets"][outputs["targets"] != NOTHING][:, None]
        words = torch.cat([own, targets.long()], 1)
        said, best, place = head_words(outputs["features"], *self.network.layer(), words)
        words, said = torch.cat([words, place], 1), torch.cat([said, best], 1)
        votes = (weights[:, None] * (words[:, :, None] == targets[:, None])).sum(-1)
        return {"words": words, "said": said, "votes": votes}

    def mixed(self, outputs: Any, vote: Any, part: Tensor) -> Any:
        """The likeliest word of a mixture is a neighbour's or the model's own, so only these are compared."""
        if not isinstance(outputs, dict):
            return super().mixed(outputs, vote, part)
        seen = vote["votes"].clamp(min=RAREST).log() + part.log()
        found, words = torch.logaddexp(seen, vote["said"] + (1 - part).log()), vote["words"]
        some = found[:, 1:]
        chosen = torch.where(some == some.amax(1, keepdim=True), words[:, 1:], self.network.vocabulary).amin(1)
        judged = {}
        for name, values in (("losses", -found[:, 0]), ("right", (chosen == words[:, 0]).float())):
            judged[name] = torch.zeros(outputs["targets"].shape)
            judged[name][outputs["targets"] != NOTHING] = values
        return judged

    def row_numbers(self, x: Tensor) -> int:
        return 0  # rows are judged in blocks of their own

    def blocks(self, rows: Params) -> list[Params]:
        return cut(rows, ROOM // (rows["x"].shape[1:].numel() * self.network.vocabulary))

    def judge(self, outputs: Any, rows: Params) -> Params:
        if isinstance(outputs, dict):
            return outputs
        return super().judge(outputs, {**rows, "y": rows["y"].long().clamp(min=0)})

    def judged(self, params: Params, rows: Params) -> Params:
        """Each token's loss and whether it is the likeliest; given tokens are skipped."""
        targets = self._targets(self.scored_rows(rows))
        scores = self.network.token_scores(self.prefix(params, rows), rows["x"], targets)
        return {"losses": scores[..., 0], "right": scores[..., 1]}

    def score(self, outputs: Any, batch: Params) -> Params:
        return super().score(outputs, self.scored_rows(batch))

    def row_values(self, outputs: Any, batch: Params, metric: str) -> Tensor:
        return super().row_values(outputs, self.scored_rows(batch), metric)


def prefix_task(about: About, safe: bool, options: Knobs) -> PrefixLM:
    """The task of a frozen model by the options of [model]: pretrained, given, l2, adapt; rank, alpha of adapters."""
    known: Knobs = {"pretrained": "", "given": PrefixLM.given, "l2": 0.0, "adapt": "prefix"}
    if options.get("adapt") == "lora":
        known |= {"rank": 8, "alpha": 16.0}
    for option in options:
        if option not in known:
            raise unknown("key", option, known, "[model] of 'frozen'")
    found = {**known, **options}
    name, given, l2, adapt = (found[option] for option in ("pretrained", "given", "l2", "adapt"))
    if not isinstance(name, str) or not name:
        raise UserError(
            "[model] of 'frozen' needs pretrained = '...': the folder of a language model, a GGUF file, a name of the "
            "Hugging Face hub, or one that `bespoke models` lists"
        )
    for option, fits, wanted in (
        ("given", type(given) is int and given >= 0, "a whole number of zero or more"),
        ("l2", type(l2) in (int, float) and 0 <= l2 < float("inf"), "a number of zero or more"),
        ("adapt", adapt in ("prefix", "lora"), "'prefix' (embeddings before a text) or 'lora' (low-rank adapters)"),
        ("rank", type(found.get("rank", 1)) is int and found.get("rank", 1) > 0, "a whole number of one or more"),
        ("alpha", type(found.get("alpha", 1)) in (int, float) and 0 < found.get("alpha", 1) < float("inf"),
         "a number above zero"),
    ):  # fmt: skip
        if not fits:
            raise UserError(f"[model] of 'frozen': {option} = {found[option]!r}: it has to be {wanted}")
    if about.get("pretrained") != name:
        raise UserError(
            f"model 'frozen' reads tokens of {name!r}, and {about.get('name', 'these data')} has other ones; use texts "
            "of a table (--text), or a source that has its texts as they were written"
        )
    longest = pretrained.facts(name).longest
    if len(about["features"]) >= longest:
        raise UserError(
            f"texts of {len(about['features'])} tokens and a prefix are too long for {name!r}, which knows {longest} "
            "positions; set a smaller length in [data]"
        )
    if adapt == "lora":
        from bespoke.models.lora import AdapterLM, LoraLM

        network = LoraLM(name, found["rank"], float(found["alpha"]))
        return AdapterLM(network, l2=float(l2), safe=safe, given=given)
    return PrefixLM(
        FrozenLM(name), l2=float(l2), safe=safe, contexts=len(about.get("contexts", ())) or 1, given=given
    )  # fmt: skip
