"""How a program ends: 0 success, 1 failure, 2 the user's mistake (no traceback), 130 stopped by Ctrl-C or SIGTERM."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from bespoke.cli.console import print_error
from bespoke.cli.output_folder import Stopped
from bespoke.errors import UserError
from bespoke.runs.events import Interrupted
from bespoke.terminal import guard

KEPT = "what was finished is kept; give the same command to go on"


def program(work: Callable[[], object]) -> NoReturn:
    """Runs the work and exits with a code. The commands of bespoke and the programs of benchmarks/ use it."""
    for stream in (sys.stdout, sys.stderr):  # a letter that the terminal does not know is no reason to fail
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    guard()
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's on empty means: the results say so themselves
    with _terminable():
        code = _outcome(work)
    sys.exit(code)


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM end the program like Ctrl-C."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # signals are for the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _outcome(work: Callable[[], object]) -> int:
    """Runs the work; returns the exit code."""
    try:
        code = work()
        sys.stdout.flush()
    except BrokenPipeError:  # `bespoke methods | head -1`: whoever read has seen enough
        _drop_output()
        return 1
    except UserError as error:
        print_error(f"bespoke: {error}")
        return 2
    except Stopped as error:
        print_error(f"bespoke: {error}")
        return 130
    except (KeyboardInterrupt, Interrupted) as error:
        print_error(f"bespoke: {str(error) or 'interrupted'}; {KEPT}")
        return 130
    except OSError as error:
        return _failed(error)
    except MemoryError as error:
        print_error(_with_notes("bespoke: not enough memory; use fewer --workers or a smaller --cohort", error))
        return 1
    except Exception as error:
        if "WorkerFailed" in (kind.__name__ for kind in type(error).__mro__):  # by name: its module is heavy to import
            print_error(_with_notes(f"bespoke: {error}", error))
            return 1
        if not hasattr(error, "format_message"):
            raise
        return _misused(error)
    if code == 130:
        print_error("bespoke: interrupted")
    return code if isinstance(code, int) else 0


def _failed(error: OSError) -> int:
    """Explains an error of the operating system: the place, the reason, what to do."""
    place = str(error.filename or "the output")
    place = place if len(place) <= 300 else f"{place[:300]}..."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        print_error(_with_notes(f"bespoke: the disk is full ({place}); free some space", error))
        return 1
    reason = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        print_error(
            _with_notes(f"bespoke: no permission for {place} ({reason}); choose another place with --out", error)
        )
        return 2
    if error.errno in (errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        print_error(f"bespoke: {place} cannot be used: {reason}; choose another name")
        return 2
    print_error(_with_notes(f"bespoke: {place}: {reason}", error))
    return 1


def _with_notes(text: str, error: BaseException) -> str:
    return "\n".join([text, *getattr(error, "__notes__", [])])


def _drop_output() -> None:
    """Discards output after the reader has gone, so that the interpreter's last flush raises no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _misused(error: Any) -> int:
    """Explains a word that the command does not know, or a value that an option does not take."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    text = error.format_message().rstrip(".")
    options = getattr(getattr(error, "param", None), "opts", [])
    found = ""
    for option, value in zip(sys.argv, [*sys.argv[1:], ""]):
        name, _, behind = option.partition("=")
        if name in options and type(error).__name__ == "BadParameter":
            found = f"; found {(behind or value)!r}"  # the last one counts
    context = getattr(error, "ctx", None)
    print_error(f"bespoke: {text}{found}. Try: {context.command_path if context else 'bespoke'} --help")
    return 2
