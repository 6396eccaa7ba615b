"""How programs end: exit code and what is said, for the commands of bespoke and for programs built on it."""

from typing import Any

import pytest

from bespoke.cli.exit_codes import KEPT, program
from bespoke.cli.output_folder import Stopped
from bespoke.errors import UserError
from bespoke.runs.events import Interrupted


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UserError("k is 0; it has to be positive"), 2, "bespoke: k is 0; it has to be positive\n"),
        (Stopped("go on with: bespoke run --resume"), 130, "bespoke: go on with: bespoke run --resume\n"),
        (Interrupted("stopped after round 3 of 9"), 130, f"bespoke: stopped after round 3 of 9; {KEPT}\n"),
        (KeyboardInterrupt(), 130, f"bespoke: interrupted; {KEPT}\n"),
        (MemoryError(), 1, "bespoke: not enough memory; use fewer --workers or a smaller --cohort\n"),
        (PermissionError(13, "Permission denied", "runs/x"), 2,
         "bespoke: no permission for runs/x (Permission denied); choose another place with --out\n"),
        (FileExistsError(17, "File exists", "t.csv"), 2,  # a folder was to be made there
         "bespoke: t.csv cannot be used: File exists; choose another name\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_no_traceback_for_what_is_not_ours(
    raised: Any, code: int, said: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        program(work)
    assert ended.value.code == code
    assert capsys.readouterr().err == said


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        program(lambda: 1 / 0)


def test_what_ends_well_ends_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program(lambda: print("done"))
    assert ended.value.code == 0
    assert capsys.readouterr() == ("done\n", "")
