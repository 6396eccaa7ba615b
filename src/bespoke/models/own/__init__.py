"""Any nn.Module as a model: `bespoke.model` describes it, and methods see it as a task."""
