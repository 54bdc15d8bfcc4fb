"""Record what studies compute, and compare two recordings to the last bit.

A change that should change no number is checked so:

    python tools/frozen_behaviour.py record before.json --data FOLDER    # before the change
    python tools/frozen_behaviour.py record after.json --data FOLDER     # after it
    python tools/frozen_behaviour.py compare before.json after.json

Recorded are, for every file of ``pipelines/``, its plan and the trials of its smoke run, and for the studies below their
plan, results and report.  Times, paths, hosts, versions and code digests are left out.  ``compare`` prints every
difference; it fails on a difference of values, and counts differences of wording apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIPELINES = Path(__file__).parent.parent / "pipelines"

#: Keys whose values depend on the machine, the moment or the text of the code.
VOLATILE = frozenset(
    [
        "attempts",
        "code",
        "codes",
        "ended",
        "folder",
        "hours",
        "host",
        "images_per_s",
        "link",
        "log",
        "memory_bytes",
        "mfu",
        "out",
        "path",
        "paths",
        "processor",
        "started",
        "state",
        "system",
        "time",
        "times",
        "tracker_link",
        "versions",
        "wall_s",
        "when",
        "written",
    ]
)

STUDIES = {
    "grid": """
study: frozen-grid
question: Do positions and attentions interact?
base:
  data: {type: digits}
  model: {type: vit, patch_size: 2, dim: 16, depth: 2, heads: 2, position: learned, attention: explicit, head: linear}
  train: {epochs: 2, batch_size: 64, optimizer: {type: adamw, lr: 5.0e-3}, evaluations: 2}
design:
  grid:
    model.position: [learned, none, rope2d, alibi2d]
    model.attention: [explicit, split]
seeds: 3
analysis: {metric: val/accuracy, compare: {to: {model.position: learned}}, margin: 0.3}
""",
    "regularised": """
study: frozen-regularised
question: Does regularisation help when training is short?
base:
  data: {type: digits, augment: [{type: crop, padding: 1}, flip]}
  model: {type: vit, patch_size: 2, dim: 16, depth: 2, heads: 2, position: sincos2d, drop: 0.1, drop_path: 0.1,
          prefix: [class], head: linear}
  train:
    epochs: 2
    batch_size: 48
    optimizer: {type: sgd, lr: 5.0e-2, momentum: 0.9}
    schedule: {type: cosine, warmup: 0.2}
    loss: {type: cross_entropy, label_smoothing: 0.1}
    clip_grad: 1.0
    evaluations: 2
design:
  one_at_a_time:
    train.mix: [{mixup: 0.8, cutmix: 1.0}]
    train.ema: [{decay: 0.9}]
    model.norm: [rmsnorm]
    model.head: [{type: mlp}]
seeds: 2
analysis: {metric: val/loss, goal: min}
run: {engine: loop}
""",
    "tuned": """
study: frozen-tuned
question: Which position is best at its own learning rate?
base:
  data: {type: digits, fraction: 0.5}
  model: {type: vit, patch_size: 4, dim: 16, depth: 1, heads: 2, position: learned, head: linear}
  train: {steps: 20, batch_size: 32, optimizer: {type: adam, lr: 1.0e-3}}
design:
  one_at_a_time: {model.position: [none, relative_bias]}
tune: {knobs: {train.optimizer.lr: [1.0e-3, 1.0e-2]}, per: arm, seeds: 1}
seeds: {count: 3, escalate_to: 5}
analysis: {metric: val/accuracy}
""",
    "distilled": """
study: frozen-distilled
question: What do a teacher and a pre-trained body add?
base:
  data: {type: digits}
  model: {type: vit, patch_size: 2, dim: 16, depth: 2, heads: 2, position: learned, prefix: [class], head: linear}
  train: {steps: 30, batch_size: 32, optimizer: {type: adamw, lr: 3.0e-3}}
  distill:
    kind: none
    teacher:
      trial: {model: {type: resnet8, width_factor: 0.25}, train: {steps: 30, batch_size: 32, optimizer: adamw}}
design:
  arms:
    plain: {}
    soft: {distill.kind: soft}
    token: {distill.kind: hard, model.prefix: [class, distillation], model.head: distilled}
    started:
      init_from:
        trial:
          data: {type: digits}
          model: {type: vit, patch_size: 2, dim: 16, depth: 2, heads: 2, position: learned, prefix: [class], head: linear}
          train: {steps: 20}
        head: new
seeds: 2
analysis: {metric: val/accuracy}
""",
    "scenes": """
study: frozen-scenes
question: Do smaller patches label pixels better?
base:
  data: {type: digit_scenes, image_size: 24, train_images: 200, digits_per_image: [1, 2], digit_size: [10, 14]}
  model: {type: vit, patch_size: 4, dim: 16, depth: 1, heads: 2, position: learned, head: segmentation}
  train: {steps: 15, batch_size: 16, optimizer: {type: adamw, lr: 3.0e-3}}
design:
  one_at_a_time: {model.patch_size: [8]}
seeds: 2
analysis: {metric: val/miou_foreground}
""",
}
for _engine in ("loop", "vmap", "batch_last"):
    STUDIES[f"engine-{_engine}"] = f"""
study: frozen-engine-{_engine}
question: Do engines agree with themselves?
base:
  data: {{type: digits}}
  model: {{type: vit, patch_size: 2, dim: 16, depth: 2, heads: 2, position: learned, attention: auto, head: linear}}
  train: {{steps: 20, batch_size: 64, optimizer: {{type: adamw, lr: 5.0e-3}}}}
design:
  one_at_a_time: {{model.position: [rope2d, conditional]}}
seeds: 3
analysis: {{metric: val/accuracy}}
run: {{engine: {_engine}}}
"""


def record(data: Path | None, names: list[str]) -> dict[str, Any]:
    """Run everything and return what it computed, as JSON values."""
    recording: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for file in sorted(file for file in PIPELINES.rglob("*.yaml") if "." not in file.stem):  # no baselines
            key = f"pipeline {file.relative_to(PIPELINES)}"
            if not names or any(part in key for part in names):
                print(key, file=sys.stderr, flush=True)
                recording[key] = _pipeline(file, root / key.replace("/", "-"), data)
        for study, text in STUDIES.items():
            key = f"study {study}"
            if not names or any(part in key for part in names):
                print(key, file=sys.stderr, flush=True)
                file = root / f"{study}.yaml"
                file.write_text(text)
                recording[key] = _study(file, root / f"out-{study}", data)
    return recording


def differences(before: Any, after: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each place at which two recordings differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key, "(absent)"), after.get(key, "(absent)"), f"{place}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}[{index}]")
    elif before != after and not (before is not after and before != before and after != after):  # NaN equals NaN
        yield place, before, after


def compare(before: Path, after: Path) -> int:
    """Print the differences of two recordings; return how many of them are differences of values."""
    values = wordings = 0
    for place, old, new in differences(json.loads(before.read_text()), json.loads(after.read_text())):
        if _is_wording(old) and _is_wording(new):
            wordings += 1
            continue
        values += 1
        print(f"{place}\n  - {json.dumps(old)[:300]}\n  + {json.dumps(new)[:300]}")
    print(f"{values} differences of values, {wordings} of wording")
    return values


def _pipeline(file: Path, out: Path, data: Path | None) -> dict[str, Any]:
    plan = _vitlab(["plan", str(file), "--json", "--out", str(out)], data)
    smoke = _vitlab(["run", str(file), "--smoke", "--out", str(out), "--set", "run.executor=inline"], data)
    return {"plan": _json(plan), "smoke": smoke.returncode, "trials": _trials(out)}


def _study(file: Path, out: Path, data: Path | None) -> dict[str, Any]:
    run = _vitlab(["run", str(file), "--out", str(out), "--set", "run.tracker=none"], data)
    report = _vitlab(["report", str(file), "--format", "json", "--out", str(out)], data)
    plans = {plan.parent.name: _scrub(json.loads(plan.read_text())) for plan in out.glob("studies/*/plan.json")}
    if run.returncode:
        sys.exit(f"{file.name} did not run, so nothing would be compared:\n{run.stdout}{run.stderr}")
    return {"run": run.returncode, "trials": _trials(out), "plan": plans, "report": _json(report)}


def _vitlab(arguments: list[str], data: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"VITLAB_DATA": str(data)} if data else {})}
    command = [sys.executable, "-m", "vitlab", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _trials(out: Path) -> dict[str, Any]:
    """Return the outcomes of an output folder: by study, arm and seed, or of smoke runs in the order of their weights."""
    outcomes: dict[str, Any] = {}
    for file in sorted(out.glob("trials/*/*/result.json")):
        result = json.loads(file.read_text())
        facts = {name: result["circumstances"][name] for name in ("params", "macs")}
        outcomes[result["key"]] = {"status": result["status"], "outcome": result["outcome"], **facts}
    named: dict[str, Any] = {}
    for plan in sorted(out.glob("studies/*/plan.json")):
        for trial in json.loads(plan.read_text())["trials"]:
            if trial["key"] in outcomes:
                named[f"{plan.parent.name}/{trial['arm']}/{trial['seed']}"] = outcomes.pop(trial["key"])
    rest = sorted(outcomes.values(), key=lambda value: json.dumps(value["outcome"], sort_keys=True))
    return named | {f"unnamed {place}": value for place, value in enumerate(rest)}


def _json(process: subprocess.CompletedProcess[str]) -> Any:
    try:
        return _scrub(json.loads(process.stdout))
    except ValueError:
        return {"exit code": process.returncode}


def _scrub(value: Any) -> Any:
    """Return JSON values without what depends on machine, moment or code."""
    if isinstance(value, dict):
        scrubbed = {key: _scrub(inner) for key, inner in value.items() if key not in VOLATILE}
        if isinstance(needs := scrubbed.get("needs"), dict):  # role to the key and code of a trial
            scrubbed["needs"] = {role: trial.partition("/")[0] for role, trial in needs.items()}
        return scrubbed
    if isinstance(value, list):
        return [_scrub(inner) for inner in value]
    return value


def _is_wording(value: Any) -> bool:
    return isinstance(value, str) and (" " in value or value == "(absent)")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("file", type=Path)
    recorder.add_argument("--data", type=Path, help="a folder with the data sets that are read from disk")
    recorder.add_argument("--only", action="append", default=[], help="record what has this in its name")
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return int(compare(arguments.before, arguments.after) > 0)
    recording = record(arguments.data, arguments.only)
    arguments.file.write_text(json.dumps(recording, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
