"""Names for values that only their reader can check: tables of TOML files, JSON objects, a method's knobs.

Values with a known form have types of their own, such as those of records.py.
"""

from typing import Any

TomlTable = dict[str, Any]  # a table of an experiment file, before experiment/checks.py validates it
JsonObject = dict[str, Any]  # an object of a JSON file, before its fields are read
Knobs = dict[str, Any]  # of a method, by name: the method declares their types, and check_knobs checks them
ByMethod = dict[str, Knobs]  # knobs, or the values to try for each, by method or label
Named = dict[str, Any]  # numbers and texts whose names a method, transform or source chooses
