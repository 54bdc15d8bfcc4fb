"""Tests of Ctrl-C in real processes: exit code 130 and no traceback, at any moment and in any number."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from vitlab.store.folders import TrialFolder

STUDY = {
    "study": "tiny",
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 100_000, "batch_size": 16, "evaluations": 1000},
    },
    "seeds": 2,
    "run": {"executor": "local", "workers": 2, "tracker": "none"},
}

BEGIN = """
import os, sys
sys.argv[0] = "vitlab"
from vitlab import interrupts
interrupts.install()
os.write(1, b"begun\\n")
from vitlab.__main__ import main
main()
"""


def start_command(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a command in its own process group, and return when it handles signals."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def study(folder: Path) -> Path:
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    return file


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.7])
def test_interrupt_at_command_start_prints_one_line(tmp_path: Path, delay_s: float) -> None:
    process = start_command(tmp_path, "plan", study(tmp_path), "--cost", "--set", "seeds=20000")
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err.lstrip()) == (130, "interrupted\n"), out


INTERRUPTS_ITSELF = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("module", ["vitlab.imports", "vitlab.__main__", "vitlab.cli", "click"])
@pytest.mark.parametrize("command", [("-m", "vitlab"), (str(Path(sys.executable).with_name("vitlab")),)])
def test_interrupt_during_own_imports_prints_one_line(tmp_path: Path, command: tuple[str, ...], module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS_ITSELF)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, *command, "list"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": module},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


def test_library_use_keeps_default_interrupt_handler(tmp_path: Path) -> None:
    """A program that uses vitlab as a library keeps its own handling, though it is called vitlab as well."""
    script = tmp_path / "vitlab"
    script.write_text("import signal, vitlab\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_interrupt_in_exec_code_exits_with_130(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("import os, signal, time\nexec('os.kill(os.getpid(), signal.SIGINT); time.sleep(60)')\n")
    words = [sys.executable, "-m", "vitlab", "validate", study(tmp_path), "--plugin", plugin]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr.lstrip()) == (130, "interrupted\n"), done.stdout


def training(folder: Path) -> bool:
    return any('"metrics"' in file.read_text() for file in folder.glob("vitlab-runs/trials/*/*/events.jsonl"))


@pytest.mark.parametrize(
    ("moment", "pause_s"),
    [
        ("planning", 0.0),
        pytest.param("starting", 0.05, marks=pytest.mark.slow),
        pytest.param("training", 0.0, marks=pytest.mark.slow),
        pytest.param("training", 0.05, marks=pytest.mark.slow),
    ],
)
def test_many_interrupts_leave_one_line_and_no_worker(tmp_path: Path, moment: str, pause_s: float) -> None:
    process = start_command(tmp_path, "run", study(tmp_path))
    deadline = time.monotonic() + 180
    lock = tmp_path / "vitlab-runs" / "studies" / "tiny" / "driver.lock"
    until = {"planning": lambda: True, "starting": lock.exists, "training": lambda: training(tmp_path)}[moment]
    while not until():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    for _ in range(15):
        try:
            os.killpg(process.pid, signal.SIGINT)
        except ProcessLookupError:
            break
        time.sleep(pause_s)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    # The last ends the process at once, or two come so late that the run says what is done.
    assert "Traceback" not in err and re.fullmatch("interrupted|interrupted; .* goes on", err.splitlines()[-1]), err
    folders = [TrialFolder(file.parent) for file in tmp_path.glob("vitlab-runs/trials/*/*/lock")]
    while any(folder.is_locked() for folder in folders):
        assert time.monotonic() < deadline, "a worker goes on without its driver"
        time.sleep(0.2)
    assert not list(tmp_path.glob("vitlab-runs/trials/*/*/result.json"))
    for file in tmp_path.glob("vitlab-runs/trials/*/*/events.jsonl"):
        assert all(json.loads(line) for line in file.read_text().splitlines())


def test_sigterm_interrupts_run(tmp_path: Path) -> None:
    process = start_command(tmp_path, "run", study(tmp_path), "--executor", "inline")
    while not training(tmp_path):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "goes on" in err and "Traceback" not in err, err
    assert len(list(tmp_path.glob("vitlab-runs/trials/*/*/checkpoint/last.safetensors"))) == 2
