"""The harness of the fuzzers: it watches one input, runs many, and prints what repeats a finding.

Input ``i`` of a seed is always the same.  An input must end well or in a VitlabError with a sentence: no other
exception, no hang, no write outside its folder, no process and no connection.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import click

from vitlab.errors import SpecError, VitlabError

LIMIT_S = 60  #: CPU time of an input
WAIT_LIMIT_S = 300  #: wall time, for inputs that wait without end, such as for a named pipe
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"}
CONNECTIONS = {"socket.connect", "socket.getaddrinfo"}

Examine = Callable[[str, int], tuple[str, str]]
"""Runs an input of a seed and returns its ending, ``wrong`` for a finding, and what is wrong or ``""``."""


class Hang(BaseException):
    """An input that exceeds its time."""


class Started(BaseException):
    """A program that was stopped before it began."""


class Guard:
    """An audit hook that sees writes outside of a folder, programs and connections, and can prevent them."""

    def __init__(self) -> None:
        self.folder = ""
        self.prevents = False
        self.stopped = False  #: whether a program was
        self.writes: list[str] = []
        self.programs: list[str] = []
        self._installed = False

    @contextmanager
    def watching(self, folder: Path, *, prevents: bool = False) -> Iterator[None]:
        if not self._installed:
            sys.addaudithook(self._hook)
            self._installed = True
        self.folder, self.prevents, self.stopped = str(folder.resolve()), prevents, False
        self.writes, self.programs = [], []
        try:
            yield
        finally:
            self.folder = ""

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and bool(set(mode) & set("wax+"))) or bool(
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if writes and isinstance(path, str | bytes):
                self._check(event, path)
        elif event in WRITES:
            for path in arguments:
                if isinstance(path, str | bytes):
                    self._check(event, path)
        elif event in PROGRAMS or (event == "socket.connect" and isinstance(arguments[1], str | bytes)):
            self.programs.append(f"{event} {arguments!r:.200}")
            if self.prevents:
                self.stopped = True
                raise Started  # of a worker, too, which begins at the socket of the fork server
        elif event in CONNECTIONS:
            self.programs.append(f"{event} {arguments!r:.200}")
            if self.prevents:
                raise socket.gaierror(socket.EAI_NONAME, "no network for fuzzers")

    def _check(self, event: str, path: str | bytes) -> None:
        name = os.fsdecode(path)
        where = "" if "\0" in name else os.path.realpath(name)
        if where not in ("", os.devnull) and not where.startswith(self.folder + os.sep):
            self.writes.append(f"{event} {where}")
            if self.prevents:
                raise PermissionError(13, "Permission denied", where)


GUARD = Guard()


def outcome(act: Callable[[], object], folder: Path, *, prevents: bool = False) -> tuple[str, str]:
    """Run one input.

    Args:
        act: what is done with it.
        folder: the only place where anything may be written.
        prevents: whether other writes, programs and connections fail; otherwise they are findings.

    Returns:
        ``done``, ``refused`` or ``wrong``, and what is wrong.
    """

    def stop(*_: object) -> None:
        raise Hang

    ending = "done"
    signal.signal(signal.SIGVTALRM, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WAIT_LIMIT_S)
    try:
        with GUARD.watching(folder, prevents=prevents):
            act()
    except Hang:
        return "wrong", f"more than {LIMIT_S} s of CPU time, or {WAIT_LIMIT_S} s\n{traceback.format_exc()}"
    except (click.ClickException, VitlabError) as error:
        sentences = [problem.message for problem in error.problems] if isinstance(error, SpecError) else [str(error)]
        if error.exit_code == VitlabError.exit_code or not sentences or not all(map(str.strip, sentences)):
            return "wrong", traceback.format_exc()
        ending = "refused"
    except (Exception, SystemExit):
        return "wrong", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not prevents and (GUARD.writes or GUARD.programs):
        return "wrong", "\n".join(GUARD.writes + GUARD.programs)
    return ending, ""


@contextmanager
def quiet() -> Iterator[tuple[io.TextIOWrapper, io.StringIO]]:
    """Keep what is printed on stdout and stderr."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        yield out, err


def main(prepared: Callable[[], AbstractContextManager[Examine]], about: str | None, inputs: int = 10_000) -> int:
    """Run a fuzzer as a command; return 1 if an input does not end as required."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=inputs)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--start", type=int, default=0, help="first input")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", metavar="SEED:I", help="run one input")
    options, _ = parser.parse_known_args()
    seed, numbers = options.seed, range(options.start, options.start + options.inputs)
    if options.only:
        seed, number = options.only.split(":")
        numbers = range(int(number), int(number) + 1)
    size = 500 if options.processes > 1 else max(1, len(numbers))
    shards = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    endings: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    with ExitStack() as stack:
        apply: Any = map
        if options.processes > 1:
            apply = stack.enter_context(multiprocessing.get_context("fork").Pool(options.processes)).imap
        for shard_endings, shard_kinds in apply(partial(_shard, prepared, seed), shards):
            endings += shard_endings
            kinds += shard_kinds
    print(f"{sum(endings.values()):,} inputs of seed {seed}: {sum(kinds.values())} findings; {dict(endings)}")
    return 1 if kinds else 0


def _shard(
    prepared: Callable[[], AbstractContextManager[Examine]], seed: str, numbers: Sequence[int]
) -> tuple[Counter[str], Counter[str]]:
    """Run some inputs in this process, and print the first finding of each kind."""
    endings: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    with prepared() as examine:
        for number in numbers:
            ending, what = examine(seed, number)
            endings[ending] += 1
            if what:
                kind = "|".join(line.strip() for line in what.strip().splitlines()[-4:] if "^^" not in line)
                if kind not in kinds:
                    print(f"--only {seed}:{number}\n{what}", flush=True)
                kinds[kind] += 1
    return endings, kinds
