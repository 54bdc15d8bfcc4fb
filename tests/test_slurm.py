"""Tests of Slurm: arguments of sbatch, and packs that are pre-empted, requeued, found and stopped.

A made-up Slurm of four shell scripts runs what sbatch is given on this machine, through submitit and its signals.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_helpers import HERE, LIGHT, PATIENCE_S, ends, job, until, with_settings

from vitlab import registry
from vitlab.errors import OptionError, UserError
from vitlab.executors import Job
from vitlab.executors import slurm as room
from vitlab.executors.slurm import Slurm, SlurmBatch
from vitlab.spec import Choice, RunSpec
from vitlab.spec.run import Resources
from vitlab.store.files import read_json, write_json
from vitlab.store.folders import TrialFolder
from vitlab.testing import check_component

pytest.importorskip("submitit")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Slurm runs on Linux")

PROGRAMS = {
    "sbatch": """
        [ ! -e $FAKE/restarts ] || { echo "sbatch: error: Unable to contact slurm controller" >&2; exit 1; }
        id=$(( $(cat $FAKE/count 2>/dev/null || echo 4710) + 1 )); echo $id > $FAKE/count
        case "$1" in --parsable) echo "$@" > $FAKE/flags.$id; cat > $FAKE/script.$id; echo "$id;cluster";;
            *) cp "$1" $FAKE/script.$id; echo "Submitted batch job $id";;
        esac
        last=$(grep -o 'array=0-[0-9]*' $FAKE/script.$id | cut -d- -f2)
        [ -n "$last" ] || echo RUNNING > $FAKE/state.$id
        for task in $([ -z "$last" ] || seq 0 $last); do echo RUNNING > $FAKE/state.${id}_$task; done
        [ ! -e $FAKE/hold ] || exit 0
        log=$(sed 's/.*--output=//; s/ .*//' $FAKE/flags.$id 2>/dev/null)
        if [ -z "$last" ]; then SLURM_JOB_ID=$id setsid -f bash $FAKE/script.$id >>${log:-$FAKE/log} 2>&1; exit; fi
        for task in $(seq 0 $last); do
            SLURM_JOB_ID=$((id + 100 + task)) SLURM_ARRAY_JOB_ID=$id SLURM_ARRAY_TASK_ID=$task \
                setsid -f bash $FAKE/script.$id >>$FAKE/log 2>&1
        done
    """,
    "srun": """
        while true; do case "$1" in
            --unbuffered|--wait=*) shift;; --output|--error) shift 2;; *) break;;
        esac; done
        nodes=$(sed -n 's/^#SBATCH --nodes=//p' $FAKE/script.${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID})
        [ "$nodes" != 1 ] || exec "$@" >>$FAKE/log 2>&1
        for node in $(seq 0 $((nodes - 1))); do
            SLURM_NODEID=$node SLURM_PROCID=$node SLURM_JOB_NODELIST=first,second "$@" >>$FAKE/log 2>&1 &
        done
        wait
    """,
    "scontrol": """
        echo "$@" >> $FAKE/requeued; task=${2#*_}
        [ "$task" = "$2" ] || export SLURM_ARRAY_JOB_ID=${2%_*} SLURM_ARRAY_TASK_ID=$task
        log=$(sed 's/.*--output=//; s/ .*//' $FAKE/flags.$2 2>/dev/null)
        SLURM_JOB_ID=${2%_*} setsid -f bash $FAKE/script.${2%_*} >>${log:-$FAKE/log} 2>&1
    """,
    "sacct": """
        echo "JobID|State|NodeList"
        for file in $FAKE/state.*; do echo "${file##*.}|$(cat $file)|here"; done
    """,
    "scancel": """
        echo "$@" >> $FAKE/cancelled
    """,
    "sinfo": """
        echo "$@" >> $FAKE/asked_sinfo; cat $FAKE/partitions 2>/dev/null || echo "cpu* (null)"
    """,
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    fake = tmp_path / "cluster"
    fake.mkdir()
    for name, text in PROGRAMS.items():
        program = fake / name
        program.write_text("#!/bin/bash\n" + text)
        program.chmod(0o755)
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("PATH", str(fake), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{HERE.parent}")
    monkeypatch.setattr(room, "POLL_S", 0.1)
    yield fake
    for pid in of_jobs(fake):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def light(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the packs of the cluster start without torch."""
    monkeypatch.setenv("PYTHONPATH", str(LIGHT), prepend=os.pathsep)


def signal_jobs(fake: Path) -> None:
    """Signal every process of the jobs, as Slurm does before their time is up."""
    for pid in of_jobs(fake):
        with suppress(ProcessLookupError):  # it has ended upon the signal to another one
            os.kill(pid, signal.SIGUSR2)


def of_jobs(fake: Path) -> list[int]:
    """Return the processes of the fake Slurm without its shells: trials and their watchers."""
    packs = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes()
            python = (process / "comm").read_text().startswith(("python", "pt_main"))
        except OSError:
            continue
        if python and f"FAKE={fake}\0".encode() in variables and b"SLURM_JOB_ID=" in variables:
            packs.append(int(process.name))
    return packs


def packs(root: Path) -> list[Path]:
    """Return the folders of all packs."""
    return sorted(file.parent for file in (root / "slurm").glob("*/*/pack.json"))


def read_text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def flags(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE))


def test_sbatch_arguments(cluster: Path, tmp_path: Path) -> None:
    (cluster / "hold").touch()
    run = RunSpec.model_validate({"threads": 2, "device": "cuda", "resources": {"gpu": 0.25, "cpu": 3}})
    own = {"partition": "gpu", "qos": "low", "mem": "7680M", "exclude": "n[1-3]", "reservation": "vit", "nice": 10}
    executor = Slurm(run, pack=5, minutes=90, sbatch={**own, "mail-type": "FAIL"}, setup=("module load cuda",))
    assert executor.slots == 80
    for do in ("a", "b", "c", "d", "e", "f", "g"):
        executor.submit(replace(with_settings(job(tmp_path, do), device="cuda"), gpu=1.0 if do == "g" else None))
    assert executor.poll(0.0) == []
    first, second = ((cluster / f"script.{number}").read_text() for number in (4711, 4712))
    options = flags(first)
    assert {name: options[name] for name in options if name not in ("output", "error", "job-name")} == {
        "time": "90",
        "partition": "gpu",
        "qos": "low",
        "mem": "7680M",
        "signal": "USR2@90",
        "cpus-per-task": "15",
        "nodes": "1",
        "gpus-per-node": "2",
        "open-mode": "append",
        "ntasks-per-node": "1",
        "exclude": "'n[1-3]'",
        "reservation": "vit",
        "mail-type": "FAIL",
        "nice": "10",
    }
    assert (flags(second)["cpus-per-task"], flags(second)["gpus-per-node"]) == ("6", "2")  # 0.25 and a whole one
    assert "\nmodule load cuda\n" in first and first.index("module load") < first.index("\nsrun ")
    assert str(tmp_path / "slurm") in options["output"]
    assert f" {sys.executable} -P -u -m submitit." in first  # nothing is imported from the current folder

    cpu = Slurm(RunSpec(), pack=2)
    cpu.submit(job(tmp_path, "h"))
    cpu.poll(0.0)
    assert "gpus-per-node" not in flags((cluster / "script.4713").read_text())


@pytest.mark.parametrize(
    ("partitions", "options", "gpus"),
    [
        ("cpu* (null)\ngpu gpu:a100:4(S:0-1)\n", {}, None),
        ("cpu* (null)\ngpu gpu:a100:4(S:0-1)\n", {"sbatch": {"partition": "gpu"}}, "2"),
        ("short (null)\nmain* gres:gpu:v100:8\n", {}, "2"),
        ("cpu* (null)\n", {"gres": "gpu:a100"}, "gpu:a100:2"),
    ],
)
def test_auto_device_asks_for_gpus_of_partition_or_says_that_it_has_none(
    partitions: str, options: dict[str, Any], gpus: str | None, cluster: Path, tmp_path: Path, caplog: Any
) -> None:
    named = options.get("sbatch", {}).get("partition", "")
    own = [line for line in partitions.splitlines(keepends=True) if line.startswith(named)]
    (cluster / "partitions").write_text("".join(own))
    (cluster / "hold").touch()
    executor = Slurm(RunSpec(), pack=2, **options)
    for do in ("a", "b"):
        executor.submit(with_settings(job(tmp_path, do), device="auto"))
    executor.poll(0.0)
    script = flags((cluster / "script.4711").read_text())
    assert (script.get("gpus-per-node") or script.get("gres")) == gpus
    assert ("the default partition of Slurm lists no GPU" in caplog.text) == (gpus is None)


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_ready_packs_are_one_array(cluster: Path, tmp_path: Path) -> None:
    executor = Slurm(RunSpec(device="cpu"), pack=1)
    work = [job(tmp_path, "finish", name=name) for name in "abc"]
    for item in work:
        executor.submit(item)
    assert {end.ending for end in ends(executor, 3).values()} == {"done"}
    assert flags((cluster / "script.4711").read_text())["array"] == "0-2%3" and not (cluster / "script.4712").exists()
    assert [read_json(folder / "pack.json")["job"] for folder in packs(tmp_path)] == ["4711_0", "4711_1", "4711_2"]
    assert Slurm(RunSpec(device="cpu")).reattach(work) == []


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_trial_on_two_nodes_has_a_task_on_each_and_one_report(cluster: Path, tmp_path: Path) -> None:
    executor = Slurm(RunSpec(device="cpu", resources=Resources(processes=4, nodes=2)), pack=4)
    executor.submit(job(tmp_path, "meet"))
    assert ends(executor, 1)["meet"].ending == "done"
    script = (cluster / "script.4711").read_text()
    assert flags(script)["nodes"] == "2" and flags(script)["cpus-per-task"] == "2" and "--wait=60" in script
    folder = job(tmp_path, "meet").folder
    assert [read_json(folder / f"node{node}.json") for node in (0, 1)] == [[str(n), "first", "24711"] for n in (0, 1)]
    assert read_ends(packs(tmp_path)[0]) == ["meet"]


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_trials_wait_while_controller_restarts(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(room, "AGAIN_S", 0.0)
    (cluster / "restarts").touch()
    executor = Slurm(RunSpec(device="cpu"), pack=2)
    for name in "ab":
        executor.submit(job(tmp_path, "finish", name=name))
    assert executor.poll(0.0) == [] and "controller does not answer" in caplog.text
    (cluster / "restarts").unlink()
    assert {end.ending for end in ends(executor, 2).values()} == {"done"}


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_time_limit_that_is_reached_twice(cluster: Path, tmp_path: Path) -> None:
    work = job(tmp_path, "train")
    executor = Slurm(RunSpec(device="cpu"), pack=1)
    executor.submit(work)
    for time in (1, 2):
        executor.poll(0.0)
        pid = until(lambda: read_json(work.folder / "pid.json"))
        (work.folder / "pid.json").unlink()
        signal_jobs(cluster)
        until(lambda process=Path(f"/proc/{pid}"): not process.exists())  # type: ignore[misc]
        until(lambda time=time: read_text(cluster / "requeued").count("requeue") == time)  # type: ignore[misc]
        assert (work.folder / "checkpoint").is_dir() and executor.poll(0.0) == []
    until((work.folder / "pid.json").exists)
    executor.cancel(PATIENCE_S)
    assert [end.ending for end in executor.poll(0.0)] == ["stopped"]


def test_detached_driver_is_a_job_that_requeues_itself(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "driver.sh").write_text("echo driver $$ ${SLURM_JOB_ID:-clean} >> $FAKE/drivers; sleep 600")
    options = (
        registry.slot("executor").resolve_choice({"type": "slurm", "sbatch": {"partition": "cpu", "nice": 5}}).options
    )
    words = ["bash", str(tmp_path / "driver.sh")]
    assert Slurm.detach(options, words, tmp_path / "driver.log") == ("Slurm job 4711", "scancel 4711")
    given = (cluster / "flags.4711").read_text()
    for flag in ("--requeue", "--partition=cpu", "--nice=5", "--signal=B:USR1@90", f"--output={tmp_path}/driver.log"):
        assert flag in given
    lines = until(lambda: read_text(cluster / "drivers").splitlines())
    _, pid, job_id = lines[0].split()
    assert job_id == "clean"  # the driver's own jobs do not inherit its limits
    (shell,) = [int(each) for each in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:2]]
    os.kill(shell, signal.SIGUSR1)  # its time is nearly up
    until(lambda: len((cluster / "drivers").read_text().splitlines()) == 2)
    assert (cluster / "requeued").read_text() == "requeue 4711\n"
    until(lambda: not Path(f"/proc/{pid}").exists())
    _, pid, _ = (cluster / "drivers").read_text().splitlines()[1].split()
    os.kill(int(pid), signal.SIGKILL)


def test_refills_respect_job_limit_and_fill_packs(cluster: Path, tmp_path: Path) -> None:
    """40 trials of different lengths are refilled one by one as they end, as by the driver."""
    (cluster / "hold").touch()  # nothing runs: this test ends trials and Slurm jobs itself
    executor = Slurm(RunSpec(device="cpu"), pack=4, jobs=3)
    assert executor.slots == 12
    todo, running, done, most = [job(tmp_path, f"t{number}") for number in range(40)], 0, 0, 0
    sizes: list[int] = []
    for tick in range(400):
        while todo and running < executor.slots:
            executor.submit(todo.pop(0))
            running += 1
        endings = executor.poll(0.0)
        running, done = running - len(endings), done + len(endings)
        results = [
            folder.parent / f"{read_json(folder / 'pack.json')['job']}_0_result.pkl" for folder in packs(tmp_path)
        ]
        alive = [folder for folder, result in zip(packs(tmp_path), results, strict=True) if not result.exists()]
        most = max(most, len(alive))
        for folder in alive:
            record = read_json(folder / "pack.json")
            finished = read_ends(folder)
            if len(finished) == len(record["trials"]):
                (
                    folder.parent / f"{record['job']}_0_result.pkl"
                ).touch()  # as submitit writes it at the end of a Slurm job
                sizes.append(len(finished))
            elif tick % (1 + len(finished)) == 0:  # one trial at a time, so that every refill comes alone
                with (folder / "ends.jsonl").open("a") as lines:
                    lines.write(json.dumps([list(record["trials"])[len(finished)], "done", ""]) + "\n")
        if done == 40:
            break
    assert done == 40 and most == 3
    assert sorted(sizes, reverse=True)[:9] == [4] * 9 and len(sizes) <= 11


def test_few_waiting_trials_are_sent_at_once(cluster: Path, tmp_path: Path) -> None:
    (cluster / "hold").touch()
    executor = Slurm(RunSpec(device="cpu", workers=2), pack=4, jobs=3)
    for do in ("a", "b"):
        executor.submit(job(tmp_path, do))
    assert executor.poll(0.0) == [] and (cluster / "script.4711").exists()
    assert not (cluster / "script.4712").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_preempted_pack_is_requeued_and_ends(cluster: Path, tmp_path: Path) -> None:
    work = [job(tmp_path, do) for do in ("resume", "finish", "raise")]
    first = Slurm(RunSpec(device="cpu"), pack=3)
    for item in work:
        first.submit(item)
    first.poll(0.0)
    until((work[0].folder / "pid.json").exists)
    (record,) = (tmp_path / "slurm").glob("*/*/pack.json")
    until(lambda: "raise" in read_ends(record.parent) and "finish" in read_ends(record.parent))
    # This driver dies here; the next finds the running jobs by their folders.
    driver = Slurm(RunSpec(device="cpu"), pack=3)
    assert {job_found.trials[0].trial.key for job_found in driver.reattach(work)} == {"resume", "finish", "raise"}
    job_found = ends(driver, 2)
    assert (job_found["finish"].ending, job_found["raise"].ending) == ("done", "error")
    assert job_found["raise"].detail == "RuntimeError: no such layer"
    signal_jobs(cluster)
    job_found = ends(driver, 1)
    assert job_found["resume"].ending == "done"
    assert (cluster / "requeued").read_text() == "requeue 4711\n"
    assert (work[0].folder / "checkpoint").is_dir() and TrialFolder(work[0].folder).done()
    assert sorted(read_ends(record.parent)) == ["finish", "raise", "resume"]  # each reported once
    assert Slurm(RunSpec(device="cpu")).reattach(work) == []
    assert read_json(record)["job"] == "4711" and (record.parent / "ended").exists()


class Killed(BaseException):
    """Exception like SIGKILL, without time for clean-up."""


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("starts", [True, False])
def test_pack_whose_driver_died_while_it_submitted_is_given_up(
    starts: bool, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next driver submits its trial again, which is trained by whichever pack holds its lease."""
    if not starts:
        (cluster / "hold").touch()  # it waits in the queue

    write = room.write_json

    def killed_then(file: Path, data: dict[str, object]) -> None:
        if data["job"] is not None:
            raise Killed
        write(file, data)

    work, first = job(tmp_path, "train"), Slurm(RunSpec(device="cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(room, "write_json", killed_then)
        first.submit(work)
        with pytest.raises(Killed):
            first.poll(0.0)
    (record,) = (tmp_path / "slurm").glob("*/*/pack.json")
    assert read_json(record)["job"] is None and (cluster / "script.4711").exists()
    if starts:
        until((work.folder / "pid.json").exists)
    driver = Slurm(RunSpec(device="cpu"))
    assert driver.reattach([work]) == [] and (record.parent / "ended").exists()
    if not starts:  # Slurm starts it after all
        batch = room.SlurmBatch(record.parent, RunSpec(device="cpu"), (work,))
        batch()
        assert not (record.parent / "started").exists() and not work.folder.exists()


def test_unsubmitted_job_is_not_awaited(cluster: Path, tmp_path: Path) -> None:
    work = job(tmp_path, "finish")
    folder = unsubmitted(work)
    assert Slurm(RunSpec(device="cpu")).reattach([work]) == [] and (folder / "ended").exists()


def unsubmitted(work: Job) -> Path:
    """Return a pack in the state before sbatch has answered."""
    folder = work.folder.parents[2] / "slurm" / "abc" / "0"
    write_json(folder / "pack.json", {"job": None, "trials": {str(work.folder): [str(work.folder)]}})
    return folder


def test_pack_of_other_study_is_left_alone(cluster: Path, tmp_path: Path) -> None:
    theirs, ours = job(tmp_path, "finish"), job(tmp_path, "train")
    folder = unsubmitted(theirs)
    assert Slurm(RunSpec(device="cpu")).reattach([ours]) == []
    assert not (folder / "ended").exists()


def read_ends(folder: Path) -> list[str]:
    try:
        lines = (folder / "ends.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [Path(json.loads(line)[0]).parent.name for line in lines]


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_cancel_writes_checkpoint_and_empties_queue(cluster: Path, tmp_path: Path) -> None:
    executor = Slurm(RunSpec(device="cpu"), pack=1)
    executor.submit(job(tmp_path, "train"))
    executor.poll(0.0)
    until((job(tmp_path, "train").folder / "pid.json").exists)
    (cluster / "hold").touch()  # the next one stays in the queue
    executor.submit(job(tmp_path, "finish"))
    executor.poll(0.0)
    executor.cancel(PATIENCE_S)
    assert {ending.job.trials[0].trial.key: ending.ending for ending in executor.poll(0.0)} == {
        "train": "stopped",
        "finish": "stopped",
    }
    assert (job(tmp_path, "train").folder / "checkpoint").is_dir()
    assert (cluster / "cancelled").read_text() == "4712\n"


@pytest.mark.parametrize(
    ("state", "how"),
    [("NODE_FAIL", "lost"), ("OUT_OF_MEMORY", "oom"), ("TIMEOUT", "timeout"), ("CANCELLED by 17", "stopped")],
)
def test_vanished_pack_is_lost(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, how: str
) -> None:
    (cluster / "hold").touch()
    monkeypatch.setattr(room, "STATE_S", 0.0)
    executor = Slurm(RunSpec(device="cpu"))
    executor.submit(job(tmp_path, "a"))
    assert executor.poll(0.0) == []
    (cluster / "state.4711").write_text(state)
    ending = ends(executor, 1)["a"]
    assert ending.ending == how and f"4711 ended ({state.split()[0]})" in ending.detail


def test_submission_errors_and_missing_tools_are_reported(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gqu' >&2\nexit 1\n")
    executor = Slurm(RunSpec(device="cpu"), sbatch={"partition": "gqu"})
    executor.submit(job(tmp_path, "a"))
    with pytest.raises(UserError, match="invalid partition specified: gqu"):
        executor.poll(0.0)
    (cluster / "srun").unlink()
    with pytest.raises(UserError, match="no srun"):
        Slurm(RunSpec())
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"pip install 'vitlab\[slurm\]'"):
        Slurm(RunSpec())


@pytest.mark.parametrize(
    "options", [{"gres": "gpu\ntouch pwned"}, {"sbatch": {"qos": "a\nb"}}, {"sbatch": {"qos=a\nb": "c"}}]
)
def test_newlines_in_options_are_refused(cluster: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        registry.slot("executor").build(Choice("slurm", options), RunSpec(device="cpu"))


def test_study_file_may_set_where_jobs_run_and_nothing_else() -> None:
    assert Slurm.cli_only_option({"sbatch": {"partition": "gpu", "nice": 5}}) is None
    assert Slurm.cli_only_option({"sbatch": {"partition": "gpu", "mail-user": "someone@else.org"}}) == "sbatch"
    assert Slurm.cli_only_option({"setup": ["rm"]}) == "setup"


def test_requeued_pack_repeats_nothing(tmp_path: Path, cluster: Path) -> None:
    """As submitit does: pickled, called, asked for a checkpoint, pickled again."""
    from submitit.helpers import DelayedSubmission

    work = (job(tmp_path, "finish"), job(tmp_path, "diverge"))
    pack = SlurmBatch(tmp_path, RunSpec(device="cpu", workers=1), work)
    lines = [json.dumps([str(item.folder), "done", ""]) for item in work]
    (tmp_path / "ends.jsonl").write_text("\n".join(lines) + '\n["/out/tri')  # killed in the middle of a line
    submission = DelayedSubmission(pack)
    for _ in range(2):
        submission.dump(tmp_path / "pickle")
        submission = DelayedSubmission.load(tmp_path / "pickle")
        submission.result()
        submission = submission._checkpoint_function()
    assert submission.function.jobs == work and read_ends(tmp_path) == ["finish", "diverge"]


@pytest.mark.slow
@pytest.mark.usefixtures("light")  # two of its jobs train, and import torch themselves
def test_packs_pass_contract_test() -> None:
    check_component("executor", "slurm")
