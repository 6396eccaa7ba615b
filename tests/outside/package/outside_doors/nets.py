"""A model: an nn.Module that knows nothing of bespoke, and its description."""

from torch import nn

import bespoke


class Net(nn.Module):
    """Two layers, with dropout between them."""

    def __init__(self, inputs=3, classes=2, hidden=8):
        super().__init__()
        self.body, self.dropout, self.out = nn.Linear(inputs, hidden), nn.Dropout(0.1), nn.Linear(hidden, classes)

    def forward(self, x):
        return self.out(self.dropout(self.body(x.flatten(1)).relu()))


net = bespoke.model(Net, head="out")
digits = bespoke.model(lambda: Net(inputs=64, classes=10, hidden=4), head="out")
