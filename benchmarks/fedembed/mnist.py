"""FedEmbed's MNIST experiment by one command: Tables 2 and 4, the confusion matrices of Figure 3, t-SNE as in Figure 4.

    python benchmarks/fedembed/mnist.py --out runs/fedembed-mnist
    python benchmarks/fedembed/mnist.py --out runs/fedembed-mnist --privacy gaussian.toml

One comparison folder each for balanced and imbalanced users, without privacy and, given a file with a [privacy] table,
with it (`balanced-none`, `imbalanced-gaussian`, ...); every folder has its report.html. What is finished is kept, so
that the command goes on where it was stopped, and adds the columns with privacy to those without.
"""

from preferences import Experiment

MNIST = Experiment("mnist", "table2", without_kinds=True)

if __name__ == "__main__":
    MNIST.run(MNIST.arguments(__doc__))
