"""FedPC's Tables 1 to 3 on TV scripts, the information in embeddings, SmolLM2-135M, and FedPC under privacy.

    BESPOKE_MODELS=FOLDER python -m benchmarks.fedpc            all parts, then docs/fedpc.md
    BESPOKE_MODELS=FOLDER python -m benchmarks.fedpc known      one part

FOLDER contains stories15M. `bespoke data tv` says where the TV scripts must be. The part smollm2 needs `bespoke models
get smollm2`, the part private `pip install 'bespoke-fl[privacy]'`. Finished parts are kept: the same command continues
where it was stopped.

    rates      learning rates from validation data, the same number of trials for every method, with a separate seed
    known      Table 1: all users train; 1, 5, 15 and all samples; own models and other users' models
    withheld   Table 2: tests three users that never trained
    seasons    contexts that users share: seasons instead of shows; own models and other users' models
    costs      Table 3 and memory: bytes and processor time of each method, in one process
    smollm2    a shorter run with SmolLM2-135M
    private    FedPC under [privacy]
    examples   Table 4: texts written by the run of smollm2
    page       docs/fedpc.md, from all finished parts
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where what all papers' tables share lies: results_claim.py and others
