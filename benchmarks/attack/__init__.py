"""Attacks bespoke: kills runs, damages files and fuzzes inputs. No result may be lost, and no command may crash or
hang.

kills    commands are killed by SIGKILL at random moments and resumed: the results are those of an uninterrupted run
damage   a file of a folder is damaged: the same results, or refused with the file's name
fuzz     odd experiments, tables and command lines: success or exit code 2, no traceback, no hang
page     the table of tries and failures, in docs/reliability.md

A try is a function of its id (part, seed, number): `--only fuzz-0-17` repeats one and shows it. Finished tries are
not repeated, so a campaign can be run in parts. Each command runs in a fresh fork of this process.
"""
