"""Any nn.Module as a model: `bespoke.model` describes it, the task of it is what methods see."""
