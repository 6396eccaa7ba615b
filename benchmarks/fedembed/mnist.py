"""FedEmbed's MNIST experiment by one command: Tables 2 and 4, the confusion matrices of Figure 3, t-SNE as in Figure 4.

    python benchmarks/fedembed/mnist.py --out runs/fedembed-mnist

Makes a comparison folder each for balanced and imbalanced users, without privacy and with it (mnist_gaussian.toml;
needs `pip install 'bespoke-fl[privacy]'`); every folder has its report.html. What is finished is kept, so that the
command goes on where it was stopped.
"""

from preferences import HERE, Experiment

from bespoke.cli.endings import program

MNIST = Experiment("mnist", "table2", privacy=HERE / "mnist_gaussian.toml", without_kinds=True)

if __name__ == "__main__":
    program(lambda: MNIST.run(MNIST.arguments(__doc__)))
