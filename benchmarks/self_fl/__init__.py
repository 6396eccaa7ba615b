"""The experiments of Self-FL's paper (Chen et al., NeurIPS 2022), each one command; see docs/methods/self-fl.md."""
