from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.data.sources.registry import SOURCES, find_file, load_source, source_options
from bespoke.data.splits import cross_device
from bespoke.data.texts import vocabulary as texts
from bespoke.errors import UserError


def test_listing_imports_neither_torch_nor_pandas() -> None:
    code = """if True:
        import sys, bespoke.data.sources.registry
        print(any(name in sys.modules for name in ('torch', 'pandas', 'pyarrow')))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_source_has_a_load_function_with_defaults() -> None:
    for name, source in SOURCES.items():
        assert source.name == name
        assert all(default is not None for default in source_options(name).values())


def test_unknown_names_and_options() -> None:
    with pytest.raises(UserError, match="Did you mean 'chem97'"):
        load_source("chem79")
    with pytest.raises(
        UserError, match=r"unknown option 'client' in the source 'digits'.*Did you mean 'clients'.*alpha"
    ):
        load_source("digits", client=3)
    with pytest.raises(UserError, match="option 'clients' of the source 'digits' is '3'; it has to be of type int"):
        load_source("digits", clients="3")
    with pytest.raises(UserError, match=r"'shard'.*Did you mean 'shards'"):
        load_source("digits", partition="shard")
    with pytest.raises(UserError, match="type int"):
        load_source("digits", clients=True)


def test_files_are_looked_for_in_both_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder.parent / "home" / ".cache" / "bespoke" / "school"
    with pytest.raises(UserError, match=r"needs the file school/school.mat.*To obtain it: put school.mat"):
        find_file("school/school.mat", "school")
    cache.mkdir(parents=True)
    (cache / "school.mat").write_bytes(b"cached")
    assert find_file("school/school.mat", "school").read_bytes() == b"cached"
    (folder / "school").mkdir()
    (folder / "school" / "school.mat").write_bytes(b"named")
    assert find_file("school/school.mat", "school").read_bytes() == b"named"
    monkeypatch.delenv("BESPOKE_DATA")
    assert find_file("school/school.mat", "school").read_bytes() == b"cached"


# Of a source that takes minutes to make, a part; its own tests count the whole.
FEWER = {"voice-preferences": {"voices": 2, "sentences": 30, "number": 2, "size": "small"}}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_describes_itself(name: Any, request: pytest.FixtureRequest) -> None:
    source = SOURCES[name]
    if source.kind == "files":
        request.getfixturevalue("real_data")
    try:
        population = load_source(name, **FEWER.get(name, {}))
    except UserError as error:
        if "To obtain it" not in str(error):
            raise
        pytest.skip(f"the files of {name} are not here")
    if "pieces" in population.columns:
        rows = np.arange(population.rows)
        population = texts.encode(population, texts.learned(population, rows), rows)
    about, columns = population.about, population.columns
    if name not in ("wikitext103", *FEWER):  # whose training file is not beside the repo
        assert (len(population), population.rows) == (source.clients, source.examples)
    assert bool(population.groups or "topics" in about) == bool(source.group) or name == "synthetic"
    assert (about["name"], about["task"], about["licence"]) == (name, source.task, source.licence)
    assert about["notes"]
    assert {"title", "target", "standardize"} <= about.keys()
    assert len(about["features"]) == len(about["numeric"]) == columns["x"].shape[1]
    dtypes = {"table": "float32", "image": "uint8", "spectrogram": "uint8", "tokens": "int16"}
    assert str(columns["x"].dtype).removeprefix("torch.") == dtypes[about["input"]]
    if source.task == "regression":
        assert str(columns["y"].dtype) == "torch.float32"
        assert about["standardize"]["features"] in ("global", "client", "none")
    if source.task == "classification":
        assert str(columns["y"].dtype) == "torch.int64"
        assert int(columns["y"].max()) < len(about["classes"])
        assert about["standardize"]["target"] is False
        assert about["input"] == "table" or about["standardize"]["features"] == "none"
    if source.task == "language":
        assert int(columns["y"].max()) < about["vocabulary"]


def test_writers_train_and_test_apart(real_data: Path) -> None:
    population = load_source("mnist-writers")
    role = population.columns["role"].numpy()[population.offsets[:-1]].astype(np.int64)
    assert (np.bincount(role) == [539, 0, 297]).all()
    assert population.about["roles"] == {"train": 539, "test": 297}
    sizes = population.sizes()
    assert (sizes[role == 0].min(), sizes[role == 0].max(), np.median(sizes[role == 0])) == (19, 131, 116)
    assert (sizes[role == 2].min(), sizes[role == 2].max(), np.median(sizes[role == 2])) == (8, 130, 21)
    split = cross_device(population, role=role)
    assert len(split.train.clients) == 539
    assert len(split.test.query.clients) == 297
