"""Classification metrics beyond accuracy, and the default metric for given data.

A client's balanced accuracy, F1 and area under the ROC curve are means over its classes: `class_sums` gives the sums
and how many classes count, in a form that stacks over clients under torch.func.vmap.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bespoke.data.about import About
from bespoke.tensors import Params

UNBALANCED = 0.8  # if the most frequent class has a larger share, accuracy hardly distinguishes a model from a constant
MOST_CLASSES = 20  # the AUC, which sorts a client's rows for every class, is computed up to so many
CELLS = 2**21  # of rows times classes that are sorted at once


def default_metric(about: About, y_train: ArrayLike) -> tuple[str, str]:
    """The default metric of a comparison, and the reason as a sentence."""
    task = about["task"]
    if task == "regression":
        return "mse", "The target is a number, so errors are squared and averaged."
    if task != "classification":
        return "accuracy", "The share of right answers."
    counts = np.unique(np.asarray(y_train), return_counts=True)[1]
    largest = counts.max() / counts.sum() if len(counts) else 0.0
    if largest <= UNBALANCED:
        return "accuracy", f"The most frequent class has {largest:.0%} of the training rows.".replace("%", " %")
    share = f"{100 * largest:.0f}" if largest < 0.995 else "over 99"
    return "loss", (
        f"{share} % of the training rows are of one class, so a constant answer is right as often; the log-loss also "
        "judges the probabilities, and every client has one, even a client of one class."
    )


def class_sums(outputs: Tensor, chosen: Tensor, y: Tensor, mask: Tensor, metrics: tuple[str, ...]) -> Params:
    """Sums over classes of the requested ones of balanced_accuracy, f1 and auc, and the numbers of classes that count.

    outputs: (rows, classes), or (rows, 1) where a positive number means class 1; chosen: the predicted class. As in
    scikit-learn, a class without rows has no recall, and one without rows and predictions has no F1.
    """
    if not {"balanced_accuracy", "f1", "auc"} & set(metrics):
        return {}
    classes = max(outputs.shape[-1], 2)
    there, said, found = (
        rows.new_zeros(classes).scatter_add(0, which.long(), rows)
        for which, rows in ((y, mask), (chosen, mask), (y, mask * (chosen == y)))
    )
    sums: Params = {}
    if "balanced_accuracy" in metrics:
        sums["balanced_accuracy"] = (found / there.clamp(min=1.0)).sum()
        sums["balanced_accuracy_count"] = (there > 0).float().sum()
    if "f1" in metrics:
        sums["f1"] = (2 * found / (said + there).clamp(min=1.0)).sum()
        sums["f1_count"] = (said + there > 0).float().sum()
    if "auc" in metrics:
        sums["auc"], sums["auc_count"] = auc_sums(outputs, y, mask)
    return sums


def auc_sums(outputs: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of areas under the ROC curves of each class against the rest, and the number of classes with one.

    Two classes have one curve. A class has a curve if some rows are of it and some are not.
    """
    if outputs.shape[-1] <= 2:
        margins = outputs[:, -1:] - outputs[:, :1] if outputs.shape[-1] == 2 else outputs
        wanted = torch.ones(1, dtype=torch.long)
    else:
        margins, wanted = torch.log_softmax(outputs, -1), torch.arange(outputs.shape[-1])
    step = max(1, CELLS // max(len(y), 1))
    blocks = [_areas(margins[:, i : i + step], y, wanted[i : i + step], mask) for i in range(0, len(wanted), step)]
    areas, defined = (torch.cat(parts) for parts in zip(*blocks))
    return areas.sum(), defined.float().sum()


def _areas(margins: Tensor, y: Tensor, wanted: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The area under the curve of each column (0 without a curve), and whether there is a curve.

    Let A be the pairs in which the row of the class is above the other, B those in which it is below. Ties count one
    half, so the area is (pairs + A - B) / (2 pairs).
    """
    values, order = margins.sort(0)
    counted = mask[:, None].expand_as(margins).gather(0, order)
    yes = (y.long()[:, None] == wanted).float().gather(0, order) * counted
    no = counted - yes
    begins = torch.cat([torch.ones_like(values[:1], dtype=torch.bool), values[1:] != values[:-1]])

    def below(rows: Tensor) -> Tensor:
        """The number of rows strictly below each row: the count before its run of ties."""
        return torch.where(begins, rows.cumsum(0) - rows, 0.0).cummax(0).values

    pairs = yes.sum(0) * no.sum(0)
    above = (yes * below(no)).sum(0) - (no * below(yes)).sum(0)
    return torch.where(pairs > 0, 0.5 + above / (2 * pairs.clamp(min=1.0)), 0.0), pairs > 0
