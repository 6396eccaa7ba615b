"""FedPC's Tables 1 to 3 on TV scripts, what users and contexts carry, SmolLM2-135M, and FedPC under privacy.

    BESPOKE_MODELS=FOLDER python -m benchmarks.fedpc            all parts, then docs/fedpc.md
    BESPOKE_MODELS=FOLDER python -m benchmarks.fedpc known      one part

FOLDER holds stories15M; the TV scripts lie where `bespoke data tv` says; smollm2 needs `bespoke models get smollm2`,
private `pip install 'bespoke-fl[privacy]'`. What is finished is kept: the same command goes on where it was stopped.

    rates      learning rates by validation data, the same number of trials for every method (a seed of its own)
    known      Table 1: all users train; 1, 5, 15 and all samples; own models against others'
    withheld   Table 2: three users are tested that never trained
    seasons    contexts that cross users: seasons in place of shows; own models against others'
    costs      Table 3 and memory: bytes and processor time of each method, in one process
    smollm2    a shorter run with SmolLM2-135M
    private    FedPC under [privacy]
    examples   Table 4: texts written by the run of smollm2
    page       docs/fedpc.md of all parts there are
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where what all papers' tables share lies: results_claim.py and others
