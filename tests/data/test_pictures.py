"""A user's own pictures by client: folders, tables of labels, sizes and colours; and from there through `compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from bespoke.api import run
from bespoke.data.tables.pictures import open_pictures
from bespoke.errors import UserError
from bespoke.experiment.checks import checked
from bespoke.experiment.loading import load_population
from command import bespoke as command
from command import refused

DRAW = np.random.default_rng(0)
RED, BLUE = (200, 10, 10), (10, 10, 200)


def picture(path: Path, pixels: Any, **how: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path, **how)


def plain(colour: tuple[int, int, int], lines: int = 6, columns: int = 4) -> Any:
    """A picture of about one colour: every pixel differs a little."""
    return np.clip(np.array(colour) + DRAW.integers(-9, 10, (lines, columns, 3)), 0, 255)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clients with six red and six blue pictures each, of 6 lines and 4 columns."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    for client in ("anna", "bob", "cid"):
        for name, colour in (("blue", BLUE), ("red", RED)):
            for number in range(6):
                picture(folder / client / name / f"{number}.png", plain(colour))
    (folder / ".hidden").write_text("not looked at")
    return folder


def test_classes_are_folders_and_pixels_are_those_of_the_file(photos: Path) -> None:
    found = open_pictures(photos)
    assert list(found.ids) == ["anna", "bob", "cid"]
    assert found.sizes().tolist() == [12, 12, 12]
    assert (found.about["classes"], found.about["task"]) == (["blue", "red"], "classification")
    assert (found.about["height"], found.about["width"], found.about["channels"]) == (6, 4, 3)
    assert found.columns["y"].tolist() == ([0] * 6 + [1] * 6) * 3
    with Image.open(photos / "bob" / "red" / "2.png") as file:
        assert found.columns["x"][20].tolist() == np.asarray(file).transpose(2, 0, 1).ravel().tolist()
    assert "class names and the size and colour" in found.about["learned"]  # a release, under [privacy]


def test_a_table_of_labels(tmp_path: Path) -> None:
    """Numbers are a regression; the client may be a column, and pictures that are not listed are left out."""
    rows = [f"a/{n}.png" for n in range(4)] + [f"deep/er/{n}.png" for n in range(4)]
    for row in rows:
        picture(tmp_path / row, np.full((3, 3), 7))
    picture(tmp_path / "a" / "other.png", np.full((3, 3), 9))
    lines = [json.dumps({"file": row, "who": f"c{place % 2}", "score": place / 2}) for place, row in enumerate(rows)]
    (tmp_path / "labels.jsonl").write_text("\n".join(reversed(lines)))
    found = open_pictures(tmp_path, "who", "score")
    assert (list(found.ids), found.about["task"], found.about["channels"]) == (["c0", "c1"], "regression", 1)
    assert found.columns["y"].tolist() == [0.0, 1, 2, 3, 0.5, 1.5, 2.5, 3.5]
    assert any("1 pictures that the table of labels does not name" in note for note in found.about["notes"])
    by_folder = open_pictures(tmp_path, "folder", "score", task="regression")
    assert list(by_folder.ids) == ["a", "deep"]
    assert by_folder.columns["x"].tolist() == [[7] * 9] * 8


def test_pictures_are_resized_whole_turned_as_the_camera_says_and_grey_if_asked(tmp_path: Path) -> None:
    """Means of pixels, by hand: the left half is 0 and the right 200. A picture on its side is turned before."""
    half = np.zeros((4, 8, 3))
    half[:, 4:] = 200
    upright = Image.Exif()
    upright[0x0112] = 6  # lies on its left side: to be turned to the right
    for client in ("a", "b"):
        picture(tmp_path / client / "x" / "1.png", half)
        picture(tmp_path / client / "y" / "2.png", np.rot90(half), exif=upright)
        picture(tmp_path / client / "y" / "3.png", np.full((2, 4, 3), 90))
    found = open_pictures(tmp_path, size=[1, 2], colour=False)
    left, right = found.columns["x"][0].tolist()
    assert (left < 50, right > 150) == (True, True)
    assert found.columns["x"][1].tolist() == found.columns["x"][0].tolist()
    assert found.columns["x"][2].tolist() == [90, 90]
    assert (found.about["height"], found.about["width"], found.about["channels"]) == (1, 2, 1)
    assert any("6 pictures were resized to 1 x 2" in note for note in found.about["notes"])
    assert open_pictures(tmp_path, size=5).about["side"] == 5


FOUR = ["a/x/1.png", "a/x/2.png", "a/y/3.png", "b/y/4.png"]


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        (["a/x/1.txt", "b/x/1.txt"], {}, "holds no pictures"),
        (["a/x/1.png", "b/2.png"], {}, "b/2.png is not where a picture is expected: .*/CLIENT/CLASS/PICTURE"),
        (["a/x/y/1.png", "b/x/1.png"], {}, "CLIENT/CLASS/PICTURE"),
        (["a/1.png", "b/1.png"], {"target": "kind"}, "one table of labels.*found none"),
        (["a/1.png", "l.csv:file,kin\na/1.png,x\n"], {"target": "kind"}, "unknown column 'kind'.*Did you mean 'kin'"),
        (["a/1.png", "l.csv:file,kind\na/2.png,x\n"], {"target": "kind"}, "names a/2.png, but the picture is not in"),
        (["a/1.png", "l.csv:file,kind\na/1.png,x\na/1.png,y\n"], {"target": "kind"}, "picture a/1.png several"),
        (["a/x/1.png", "a/y/2.png"], {}, "one client only"),
        (["a/x/1.png", "b/y/2.png"], {}, "every client would have one example"),
        ([*FOUR, "b/x/broken.png:text"], {}, "broken.png is not a readable picture"),
        ([*FOUR, "b/x/large.png"], {}, "from 2 x 3 to 2 x 300.*data.size = 32"),
        ([*FOUR, "b/x/deep.png"], {}, "deep.png has more than 8 bits a channel"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, files: list[str], arguments: dict[str, str], said: str) -> None:
    for name in files:
        name, _, text = name.partition(":")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if text or not name.endswith(".png"):
            (tmp_path / name).write_text(text)
        elif "deep" in name:
            Image.fromarray(np.zeros((2, 3), np.uint16)).save(tmp_path / name)
        else:
            picture(tmp_path / name, np.zeros((2, 300 if "large" in name else 3)))
    with pytest.raises(UserError, match=said):
        open_pictures(tmp_path, **arguments)


CONFIG: dict[str, Any] = {
    "model": {"name": "fedembed-cnn"},
    "split": {"fractions": [0.5, 0.25, 0.25]},
    "engine": {"kind": "looped"},
    "stage": [{"method": "fedavg", "rounds": 3, "lr": 0.01, "epochs": 3, "optimizer": "adam"}],
}


def test_a_network_learns_from_pictures_that_are_not_square(photos: Path, tmp_path: Path) -> None:
    """Red against blue: no mistake is left."""
    data = {"table": str(photos), "client": "folder", "target": "folder"}
    run({**CONFIG, "data": data}, tmp_path / "run")
    scores = pd.read_parquet(tmp_path / "run" / "clients.parquet")
    assert scores["query_accuracy"].tolist() == [1.0, 1.0, 1.0]


def test_what_the_command_line_refuses(photos: Path, tmp_path: Path) -> None:
    begun = ("compare", photos, "--target", "folder", "--out", tmp_path / "a")
    refused(command(*begun, "--group", "g"), "group", "pictures")
    refused(command("compare", photos, "--out", tmp_path / "a"), "no texts", "--target folder")
    schema = ("--write-schema", tmp_path / "s.json")
    refused(command("data", photos, "--target", "folder", *schema), "schema", "pictures")
    refused(command(*begun, "--set", "data.size=[3]"), "data.size", "[24, 32]")


def test_size_and_colour_from_an_experiment_file(photos: Path) -> None:
    data = {"table": str(photos), "target": "folder", "size": [4, 4], "colour": False}
    found = load_population(checked({**CONFIG, "data": data}, "here"))
    assert found.columns["x"].tolist() == open_pictures(photos, size=4, colour=False).columns["x"].tolist()
    assert (found.about["side"], found.about["channels"]) == (4, 1)
    with pytest.raises(UserError, match="size, colour describe pictures"):
        checked({**CONFIG, "data": {"source": "digits", "size": 3, "colour": True}}, "here")
