"""An attack on bespoke: runs are killed, files damaged, inputs fuzzed. None may be lost, crash or hang.

kills    commands are killed by SIGKILL at random moments and resumed: the results are those of an uninterrupted run
damage   a file of a folder is damaged: the same results, or refused with the file's name
fuzz     experiments, tables and command lines that nobody meant: success or exit code 2, no traceback, no hang
page     the table of tries and failures, in docs/reliability.md

A try is a function of its id (part, seed, number): `--only fuzz-0-17` repeats one and shows it. Tries that are done are
not repeated, so that a campaign can be run in slices. Each command runs in a fresh fork of this process.
"""
