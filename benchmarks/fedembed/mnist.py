"""FedEmbed's MNIST experiment by one command: Tables 2 and 4, the confusion matrices of Figure 3, t-SNE as in Figure 4.

    python benchmarks/fedembed/mnist.py --out runs/fedembed-mnist

Makes a comparison folder each for balanced and imbalanced users, without privacy and with it (mnist_gaussian.toml;
needs `pip install 'bespoke-fl[privacy]'`); every folder has its report.html. What is finished is kept, so that the
command goes on where it was stopped.

    python benchmarks/fedembed/mnist.py --columns clients    noise on the clients too (mnist_gaussian_clients.toml)
    python benchmarks/fedembed/mnist.py --figures            Figures 3 and 4, at the rates of figures.toml
    python benchmarks/fedembed/mnist.py --full               9,000 users, into runs/fedembed-mnist-full

--full is Section 4.2 at its size, once: 9,000 balanced users, 900 rounds of 60 so that everyone trains six times, one
seed, without privacy and with noise on the sum, of Global, FedRep, FedEmbed-Personal, -Prototype and -Type. It has not
been run to its end. Three rounds of FedEmbed-Type took 0.8 s of one core each and 0.65 GB; of the other methods a round
takes up to four times as long (FedEmbed-Personal: three epochs). That makes about four hours of one core in all, two
hours with two cores (`--jobs 2`, the default). A run that is stopped goes on from its checkpoint.
"""

from preferences import HERE, Experiment

from bespoke.cli.endings import program

MNIST = Experiment(
    "mnist", "table2", HERE / "mnist_gaussian.toml", HERE / "mnist_gaussian_clients.toml", without_kinds=True
)

if __name__ == "__main__":
    program(lambda: MNIST.run(MNIST.arguments(__doc__)))
