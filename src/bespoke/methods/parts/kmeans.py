"""k-means for few and long points whose ties must not depend on rounding (PFedKM).

If centres are equally near up to rounding, the first counts. For a cohort of one client all centres are equally near,
and with an exact comparison, such as scikit-learn's, the last digit of an engine's sums would decide. Centres are kept
as mixtures of the points and of the previous centres, so that all distances follow from one table of products.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-5  # of squared distances between points of length 1, in float32


def kmeans(points: Tensor, centres: Tensor, iterations: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """(cluster of every point, centres) by Lloyd's algorithm, from these centres or (`seed`) from k-means++.

    Points have length 1, or 0. A centre without points does not move.
    """
    many, k = len(points), len(centres)
    if seed is not None:
        centres = points[_spread_out(points @ points.mT, k, seed)]
    both = torch.cat([points, centres])
    products = both @ both.mT
    mixture = torch.eye(many + k)[many:]  # (centres, points and centres before)
    for remaining in reversed(range(iterations + 1)):
        lengths = products.diagonal()[:many, None] + torch.einsum("ki,ij,kj->k", mixture, products, mixture)
        squares = lengths - 2 * products[:many] @ mixture.mT
        places = (squares <= squares.amin(1, keepdim=True) + ROUNDING).int().argmax(1)
        if remaining:
            members = (torch.arange(k)[:, None] == places).float()
            sizes = members.sum(1, keepdim=True)
            mean = torch.cat([members / sizes.clamp(min=1), torch.zeros(k, k)], 1)
            mixture = torch.where(sizes > 0, mean, mixture)
    return places, mixture @ both


def _spread_out(products: Tensor, k: int, seed: int) -> list[int]:
    """k-means++ (Arthur and Vassilvitskii 2007): draws the next centre by squared distance to the chosen ones."""
    draw = torch.Generator().manual_seed(seed)
    lengths = products.diagonal()
    squares = lengths[:, None] + lengths - 2 * products
    chosen = [int(torch.randint(len(products), (1,), generator=draw))]
    while len(chosen) < k:
        far = squares[:, chosen].amin(1)
        chosen.append(int(torch.multinomial(far.clamp(min=ROUNDING), 1, generator=draw)))
    return chosen
