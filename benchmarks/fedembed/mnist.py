"""FedEmbed's MNIST experiment by one command: Tables 2 and 4, the confusion matrices of Figure 3, t-SNE as in Figure 4.

    python benchmarks/fedembed/mnist.py --out runs/fedembed-mnist

Makes a comparison folder each for balanced and imbalanced users, without privacy and with it (mnist_gaussian.toml;
needs `pip install 'bespoke-fl[privacy]'`); every folder has its report.html. What is finished is kept, so that the
command goes on where it was stopped.

    python benchmarks/fedembed/mnist.py --columns clients    noise on the clients too (mnist_gaussian_clients.toml)
    python benchmarks/fedembed/mnist.py --figures            Figures 3 and 4, at the rates of figures.toml
    python benchmarks/fedembed/mnist.py --curves             one seed of each with a validation curve (60 % of the time)
    python benchmarks/fedembed/mnist.py --full               9,000 users, into runs/fedembed-mnist-full

--full is Section 4.2 at its size, once: 9,000 balanced users, 900 rounds of 60 so that everyone trains six times, one
seed, without privacy and with noise on the sum, of Global, FedRep, FedEmbed-Personal, -Prototype and -Type. It has not
been run to its end. A trial of three rounds of FedEmbed-Type, on a busy machine, had 0.64 GB at most and about 0.8 s of
one core a round (with 600 users: 1.4 s by the clock). Other methods were not timed at this size; FedEmbed-SOM, of three
epochs like FedEmbed-Personal, took 3.4 times as long with 600 users. Extrapolated, both columns take 4 to 8 hours
of one core, half of that with two (`--jobs 2`, the default). A run that is stopped goes on from its checkpoint.
"""

from preferences import HERE, Experiment

from bespoke.cli.exit_codes import program

MNIST = Experiment(
    "mnist", "table2", HERE / "mnist_gaussian.toml", HERE / "mnist_gaussian_clients.toml", without_kinds=True
)

if __name__ == "__main__":
    program(lambda: MNIST.run(MNIST.arguments(__doc__)))
