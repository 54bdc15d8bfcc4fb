"""Processes that start with the heavy packages imported: one server per test process imports them once, and forks.

For tests that need a process of their own, with its own packages, folder and variables, but not the start of Python;
importing torch takes longer than what most of them do.  Nothing of vitlab or of its plugins is imported before.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping
from pathlib import Path

IMPORTS = (
    *("torch", "torch._dynamo", "torch.profiler._cupti_monitor", "pandas", "pyarrow.parquet", "scipy.stats"),
    *("matplotlib.backends.backend_agg", "sklearn.datasets", "pydantic", "yaml", "click", "jinja2", "rich.table", "pytest"),
)  # fmt: skip
LIMIT_S = 600  #: time limit of a process; the server then ends with it


def python(code: str, cwd: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run code as ``python -c`` does, with the imports of the server."""
    with tempfile.TemporaryDirectory(prefix="vitlab-warm-") as name:
        out, err = Path(name) / "out", Path(name) / "err"
        status = _ask(code, cwd, environment, out, err)
        return subprocess.CompletedProcess([sys.executable, "-c", code], status, out.read_text(), err.read_text())


def start(code: str, cwd: Path, environment: Mapping[str, str]) -> int:
    """Run code likewise without waiting for its end, and return the number of its process; nobody reads its output."""
    return _ask(code, cwd, environment, Path(os.devnull), Path(os.devnull), waits=False)


def _ask(code: str, cwd: Path, environment: Mapping[str, str], out: Path, err: Path, *, waits: bool = True) -> int:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    request = {"code": code, "cwd": str(cwd.absolute()), "environment": dict(environment), "waits": waits}
    server.stdin.write(json.dumps({**request, "out": str(out), "err": str(err)}) + "\n")
    server.stdin.flush()
    timer = threading.Timer(LIMIT_S, server.kill)
    timer.start()
    answer = server.stdout.readline()
    timer.cancel()
    assert answer, "the server of tests/warm.py has ended"
    return int(answer)


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    atexit.register(server.communicate)  # the end of its input ends it
    return server


def _serve() -> None:
    del sys.path[0]  # the folder of this file
    for name in IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run_and_exit(request)
        answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if request["waits"] else child
        print(answer, flush=True)


def _run_and_exit(request: Mapping[str, str]) -> None:
    code = 1
    try:
        for descriptor, file in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
        environment: Mapping[str, str] = request["environment"]  # type: ignore[assignment]
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(environment)
        sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
        sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        sys.argv = ["-c"]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
