"""A fuzzer of what commands are given: command lines, tables, weight files, picture folders and trackers' addresses.

    python tools/fuzz_inputs.py --inputs 5000 --seed 7
    python tools/fuzz_inputs.py tables --inputs 1000 --seed 7

Every input is given to a command in this process.  A refused command must have written nothing, and no command may run
code of an input, print a password, or end with a traceback.  Writes elsewhere, programs and connections are prevented.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import pickle
import shutil
import struct
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import click
import yaml

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_store
from fuzzing import GUARD, Examine, main, outcome, quiet
from mutations import NUMBERS, TEXTS, mutate_bytes, mutate_text, mutate_tree

from vitlab import cli
from vitlab.errors import UserError

KINDS = ("commands", "tables", "weights", "pictures", "addresses")
CANARY = "code-was-run"  #: the file that hostile inputs try to make
PASSWORD = "hush-hush"
HOSTILE = (
    *("study.yaml", "out", "folder", "loop", "dangling", "pipe", "empty", "nowhere", "study.yaml/below", "loop/below"),
    *("/dev/null", "/dev/zero", "/proc/self/mem", "/root/x", "x" * 300, "x/" * 3000, "nul\0byte", "\udcff", "-", "--", "~"),
)  # fmt: skip
CELLS = (
    *("", "-", "n.a.", "NaN", "inf", "-inf", "1e999", "1_0", "\uff11", "0,5", "1.234,5", "1,234.5", "91.2%", "91.2 %"),
    *("91.2 ± 0.3", "91.2 (0.3)", "crashed", "failed", "mean", "std", "=1+1", '"', "'", "a\nb", "\0", "\x1b[2J", "True"),
    *("1.797e308", "-1e308", "5e-324", "0x10", "1 234", "٣", "2026-01-01", "[1, 2]", "{}", "seed 3", "\ufeff", "None"),
)  # fmt: skip


class Evil:
    """An object that makes the canary when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (CANARY,)


def command_lines() -> list[tuple[list[str], list[click.Parameter]]]:
    """Return every command with its parameters."""
    found = []
    for name in cli.COMMANDS:
        command = cli.cli.get_command(click.Context(cli.cli), name)
        assert command is not None
        below = command.commands if isinstance(command, click.Group) else {"": command}
        found += [([name, *filter(None, [word])], sub.params) for word, sub in below.items()]
    return found


def commands(rng: Random, folder: Path) -> list[str]:
    """Make a command line of a command's own parameters, with wild values."""
    words, parameters = rng.choice(command_lines())
    words = [*words]
    for parameter in parameters:
        if isinstance(parameter, click.Argument):
            words += [_value(rng, parameter)] * (rng.random() < 0.95)
        elif parameter.required or rng.random() < 0.3:
            name = rng.choice(parameter.opts)
            words.append(name if rng.random() < 0.97 else mutate_text(rng, name, 1))
            if not getattr(parameter, "is_flag", False):
                words.append(_value(rng, parameter))
    words += [rng.choice(TEXTS)] * (rng.random() < 0.03)
    return words


def _value(rng: Random, parameter: click.Parameter) -> str:
    likely = {
        "study": "tiny",
        "file": "study.yaml",
        "files": "study.yaml",
        "folder": "out",
        "first": "tiny",
        "out": "out",
    }
    if parameter.name == "set_options" or "--set" in parameter.opts:
        path = rng.choice(
            ("model.dim", "seeds", "run.executor", "train.steps", "study", "data.root", "run.tracker", "a.b")
        )
        return rng.choice((f"{path}={rng.choice((*TEXTS, *map(str, NUMBERS)))}", rng.choice(TEXTS)))
    kind = rng.random()
    if kind < 0.45:
        choices = getattr(parameter.type, "choices", ())
        return rng.choice(choices) if choices else likely.get(parameter.name or "", "2")
    return rng.choice(HOSTILE) if kind < 0.75 else str(rng.choice((*TEXTS, *NUMBERS, *CELLS)))


def tables(rng: Random, folder: Path) -> list[str]:
    """Write a table in some form, with wild cells, and judge it."""
    arms = rng.sample(["base", "wide", "None", "resnet 50", "seed", "1"], rng.randint(1, 4))
    rows: list[dict[str, Any]] = [
        {"arm": arm, "seed": seed, "acc": round(rng.uniform(60, 95), 2)} for arm in arms for seed in range(rng.randint(1, 5))
    ]  # fmt: skip
    if rng.random() < 0.3:
        rows = [{arm: rng.random() for arm in arms} for _ in range(rng.randint(1, 6))]
    for _ in range(rng.choice((0, 0, 1, 1, 3))):
        name = rng.choice((*rows[0], rng.choice(("epoch", "step", "Unnamed: 0", "status", "val/acc__MAX", *TEXTS))))
        for row in rng.choice((rows, [rng.choice(rows)])):
            row[name] = rng.choice((*CELLS, *TEXTS, *NUMBERS, None))
    suffixes = [".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx"] * 3 + ["", ".txt"]
    file = folder / f"table{rng.choice(suffixes)}"
    file.write_bytes(_rename_table(rng, rows, file.suffix))
    if rng.random() < 0.2:
        file.write_bytes(mutate_bytes(rng, file.read_bytes()))
    words = ["judge", rng.choice(HOSTILE) if rng.random() < 0.03 else str(file)]
    words += ["--metric", "acc" if rng.random() < 0.9 else rng.choice(TEXTS)]
    options = {"--arm": "arm", "--seed": "seed", "--goal": "max", "--margin": "0.5 points", "--baseline": arms[0]}
    for name, value in options.items():
        likely = 0.9 if name in ("--arm", "--goal") else 0.4
        words += [name, value if rng.random() < 0.96 else str(rng.choice((*TEXTS, *CELLS)))] * (rng.random() < likely)
    for name in ("--chance", "--images", "--alpha", "--format"):
        words += [name, str(rng.choice((*NUMBERS, 0.1, 10, "3,5", "json", "md", "csv")))] * (rng.random() < 0.05)
    return words


def _rename_table(rng: Random, rows: list[dict[str, Any]], suffix: str) -> bytes:
    import pandas

    if suffix in (".json", ".jsonl"):
        rows = mutate_tree(rng, rows, 2) if rng.random() < 0.5 else rows
        text = json.dumps(rows)
        if suffix == ".jsonl" and isinstance(rows, list):
            text = "\n".join(json.dumps(row) for row in rows)
        return (("[" * 100_000 + text) if rng.random() < 0.03 else text).encode()
    if suffix in (".parquet", ".xlsx"):
        content = io.BytesIO()
        frame = pandas.DataFrame([{str(name): str(value) for name, value in row.items()} for row in rows])
        with suppress(Exception):  # what pandas cannot write leaves part of a file
            frame.to_parquet(content) if suffix == ".parquet" else frame.to_excel(
                content, index=False, engine="openpyxl"
            )
        return content.getvalue()
    names = list({name: None for row in rows for name in row})
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=rng.choice(",;\t|"), quoting=rng.choice((csv.QUOTE_ALL, csv.QUOTE_MINIMAL)))
    writer.writerows([names, *([row.get(name, "") for name in names] for row in rows)])
    text = mutate_text(rng, buffer.getvalue()) if rng.random() < 0.2 else buffer.getvalue()
    return text.encode(rng.choice(("utf-8", "utf-8-sig", "utf-16", "cp1252", "utf-32", "utf-7")), "replace")


def weights(rng: Random, folder: Path) -> list[str]:
    """Write a damaged or hostile file of weights, and inspect or convert it."""
    import torch
    from safetensors.torch import load_file, save

    file = folder / f"weights{rng.choice(('.safetensors', '.pth', '.pt', '.bin', '.npz', ''))}"
    kind = rng.random()
    if kind < 0.35:
        whole = folder / f"whole{rng.choice(('.safetensors', '.pth', '.npz'))}"
        file.write_bytes(mutate_bytes(rng, whole.read_bytes(), 2))
    elif kind < 0.7:
        state: dict[str, Any] = load_file(folder / "whole.safetensors")
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(list(state))
            value = state.pop(name)
            change = rng.randrange(6)
            if change < 2:
                state[mutate_text(rng, name, 1)] = value
            elif change < 5:
                shapes = ((0,), (), (1, 1), (3, 5, 7), (2, 0, 2), (1,) * 9)
                types = (torch.bool, torch.int8, torch.complex64, torch.float64, torch.bfloat16)
                state[name] = rng.choice((torch.zeros(rng.choice(shapes)), torch.ones(4).to(rng.choice(types))))
            elif file.suffix != ".safetensors":
                state[name] = rng.choice((None, 1, "x", [1], {}, {"a": torch.ones(1)}))
        content = io.BytesIO()
        nested = rng.choice((state, {"model": state}, {"state_dict": {"module": state}}, [state], {}))
        with suppress(Exception):
            torch.save(nested, content, _use_new_zipfile_serialization=rng.random() < 0.5)
        file.write_bytes(save(state) if file.suffix == ".safetensors" else content.getvalue())
    elif kind < 0.95:
        file.write_bytes(rng.choice(_hostile_weights()))
    if file.exists() and rng.random() < 0.8:
        file = file.rename(file.with_suffix(_suffix(file.read_bytes())))
    words = ["weights", "inspect", str(file) if kind < 0.95 else rng.choice(HOSTILE)]
    if rng.random() < 0.5:
        to, suffix = rng.choice((("timm", ".pth"), ("hf", ".safetensors"), ("google", ".npz"), ("torchvision", ".bin")))
        target = (
            f"target{suffix}"
            if rng.random() < 0.8
            else rng.choice(("folder", "loop", "x" * 300, "target", "loop/x.pth"))
        )
        words = ["weights", "convert", words[-1], target, "--to", to]
        options = {
            "--image": "8",
            "--head": "drop",
            "--classes": "empty",
            "--resample": "hf",
        }
    else:
        options = {"--json": ""}
    for name, value in {**options, "--from": "timm", "--heads": "1", "--source-grid": "2x2"}.items():
        if rng.random() < 0.15:
            words += [name, value if rng.random() < 0.8 else str(rng.choice((*NUMBERS, *TEXTS)))] if value else [name]
    return words


def _suffix(data: bytes) -> str:
    """Return the suffix of a container of weights."""
    if data.startswith(b"PK"):
        return ".npz" if b".npy" in data else ".pth"
    return ".safetensors" if data[8:9] == b"{" else ".npz" if data.startswith(b"\x93NUMPY") else ".pth"


def _hostile_weights() -> list[bytes]:
    """Return pickles that run code, archives and headers that promise gigabytes, and files of nothing."""
    import numpy
    import torch

    evil = []
    for value in (Evil(), {"model": Evil()}, {"head.weight": torch.ones(2), "x": Evil()}):
        for zipped in (True, False):
            torch.save(value, content := io.BytesIO(), _use_new_zipfile_serialization=zipped)
            evil.append(content.getvalue())
        evil.append(pickle.dumps(value))
    numpy.savez(content := io.BytesIO(), x=numpy.array([Evil()], dtype=object))
    evil.append(content.getvalue())
    shape = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }\n"
    with zipfile.ZipFile(content := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(shape)) + shape)
        archive.writestr("../../y.npy", bytes(2**26))
    evil.append(content.getvalue())
    header = b'{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}'
    evil += [struct.pack("<Q", len(header)) + header + bytes(4), struct.pack("<Q", 2**62) + header]
    return [*evil, b"", b"\0" * 64, b"(" * 100_000, b"\x80\x02" + b"]" * 100_000, b"PK\x03\x04", b"\x93NUMPY", b"{}"]


def pictures(rng: Random, folder: Path) -> list[str]:
    """Make a folder of classes with hostile entries, and run a study that reads all pictures."""
    from PIL import Image

    root = folder / "pictures"
    classes = [
        place for split in ("train", rng.choice(("val", "test"))) for place in (root / split / "a", root / split / "b")
    ]
    for number, place in enumerate(classes):
        place.mkdir(parents=True)
        for image in range(2):
            colour = (number * 50, image * 90, rng.randrange(255))
            Image.new("RGB", (9, 8), colour).save(place / f"{image}.png")
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.choice((*classes, *classes, root, root / "train", root / "new"))
        name = rng.choice(("x.png", "x.jpg", "x.tiff", ".x.png", "._x.png", "\udcff.png", "a\nb.png", "é.png", "X.PNG", "c", "x" * 251 + ".png"))  # fmt: skip
        with suppress(OSError):
            place.mkdir(exist_ok=True)
            _picture(rng, place / name)
    data = {"type": "image_folder", "root": "pictures", "image_size": 8}
    data |= rng.choice(({}, {}, {"test": 0.5}, {"validation": 2}, {"test": rng.choice(NUMBERS)}, {"image_size": rng.choice((1, 8192, [8, 4]))}, {"root": rng.choice(HOSTILE)}))  # fmt: skip
    base = fuzz_store.STUDY["base"] | {"data": data}  # type: ignore[operator]
    (folder / "pictures.yaml").write_text(yaml.safe_dump({**fuzz_store.STUDY, "base": base}))
    return [rng.choice(("run", "run", "plan")), "pictures.yaml", "--out", "new"]


def _picture(rng: Random, file: Path) -> None:
    """Make an entry of a folder: a picture of some mode, a broken one, a link, a pipe or a folder."""
    from PIL import Image

    content, kind = io.BytesIO(), rng.randrange(12)
    mode = rng.choice(("1", "L", "P", "LA", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr", "LAB", "HSV"))
    if os.path.lexists(file):
        return
    if kind == 0:
        file.symlink_to(rng.choice((file.parent, file, "/dev/zero", "nowhere", "/", "../../train")))
    elif kind == 1:
        os.mkfifo(file)
    elif kind == 2:
        file.mkdir()
    elif kind == 3:
        shutil.rmtree(file.parent)
    else:
        image = Image.new(mode, rng.choice(((9, 8), (1, 1), (3000, 1), (64, 64))))
        with suppress(Exception):
            image.save(content, rng.choice(("PNG", "JPEG", "TIFF", "GIF", "WEBP", "BMP")), exif=rng.randbytes(30))
        data = content.getvalue()
        if kind < 7:
            data = mutate_bytes(rng, data)
        elif kind == 7:  # a header that promises 2^31 columns
            data = (
                b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII5B", 13, b"IHDR", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0) + data
            )
        file.write_bytes(data)


def addresses(rng: Random, folder: Path) -> list[str]:
    """Name a tracker's address to a command, or in a study."""
    scheme = rng.choice(
        ("http", "https", "sqlite", "postgresql", "file", "databricks", "ftp", "HTTP", "", "mlflow-artifacts")
    )
    user = rng.choice(("", "", f"me:{PASSWORD}@", f"{PASSWORD}@", f":{PASSWORD}@"))
    host = rng.choice(("127.0.0.1", "localhost", "[::1]", "[::1", "evil.example", "", "/", "/out/mlflow.db", "2130706433", "x" * 300))  # fmt: skip
    port = rng.choice(("", "", ":5000", ":0", ":99999", ":-1", ":x"))
    rest = rng.choice(("", "/", "/#/experiments/1", "#tiny", "/a b", "?x=1", "/../..", "/%00", "\n", "/study.yaml"))
    uri = f"{scheme}://{user}{host}{port}{rest}"
    uri = rng.choice((uri, uri, uri, mutate_text(rng, uri.replace(PASSWORD, "x"), 2), rng.choice((*TEXTS, *HOSTILE))))
    (folder / "study.yaml").write_text(json.dumps({**fuzz_store.STUDY, "run": {"executor": "inline"}}))
    (folder / "tracked.yaml").write_text(
        json.dumps({**fuzz_store.STUDY, "run": {"tracker": {"type": "mlflow", "uri": uri}, "executor": "inline"}})
    )
    return rng.choice((
        ["run", "study.yaml", "--out", "new", "--tracking-uri", uri],
        ["run", "study.yaml", "--out", "new", "--set", f"run.tracker.uri={uri}"],
        ["plan", "study.yaml", "--out", "new", "--set", f"run.tracker.uri={uri}"],
        ["run", "tracked.yaml", "--out", "new"], ["validate", "tracked.yaml"],
        ["sync", "out", "--tracking-uri", uri], ["judge", uri, "--metric", "acc", "--arm", "arm"],
    ))  # fmt: skip


def read_data(schedule: Any) -> None:
    """Stand in for :meth:`vitlab.driver.scheduler.Schedule.run_jobs`: read the data of the trials, and train nothing."""
    from vitlab.data.prepare import prepare

    for trial in {planned.arm: planned.trial for planned in schedule._planned.values()}.values():
        prepare(trial.spec.plain()["data"], trial.seeds)


def state(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return what changes when something in a folder is written."""
    found = {}
    for place, folders, files in os.walk(folder):
        if place == str(folder):
            folders[:] = [name for name in folders if name != "cache"]
        for name in (*folders, *files):
            status = os.lstat(path := os.path.join(place, name))
            found[path] = (status.st_mode, status.st_ino, 0 if name in folders else status.st_mtime_ns)
    return found


class Bench:
    """A folder with a finished study, weights and odd entries; it is made anew after an input has changed it."""

    def __init__(self, root: Path, kinds: Sequence[str]) -> None:
        self.folder, self.store = root / "here", root / "store"
        self.makers: list[Callable[[Random, Path], list[str]]] = [globals()[kind] for kind in kinds]
        self.store.mkdir()
        fuzz_store.build(self.store)
        if weights in self.makers:
            self._write_weights()
        self.restore()

    def _write_weights(self) -> None:
        import torch
        from safetensors.torch import save_file

        from vitlab.weights.conversion import convert_weights_file

        shapes = {"cls_token": (1, 1, 64), "pos_embed": (1, 5, 64), "patch_embed.proj.weight": (64, 3, 4, 4)}
        shapes |= {"blocks.0.attn.qkv.weight": (192, 64), "blocks.0.attn.proj.weight": (64, 64), "head.weight": (3, 64)}
        shapes |= {"blocks.0.mlp.fc1.weight": (256, 64), "blocks.0.mlp.fc2.weight": (64, 256)}
        shapes |= {f"{norm}.weight": (64,) for norm in ("norm", "blocks.0.norm1", "blocks.0.norm2")}
        biases = {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if "weight" in name}
        state = {name: torch.randn(shape) for name, shape in (shapes | biases).items()}
        save_file(state, whole := self.store / "whole.safetensors")
        for suffix, to in ((".pth", "timm"), (".npz", "google")):
            convert_weights_file(whole, whole.with_suffix(suffix), to)

    def restore(self) -> None:
        """Make the folder anew."""
        os.chdir(self.store)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.store, self.folder)
        os.chdir(self.folder)
        (self.folder / "tiny.yaml").rename("study.yaml")
        for name in ("folder", "tmp"):
            (self.folder / name).mkdir()
        for name in ("loop", "dangling"):
            (self.folder / name).symlink_to("loop" if name == "loop" else "missing")
        os.mkfifo(self.folder / "pipe")
        (self.folder / "empty").write_bytes(b"")
        self.pristine = state(self.folder)

    def call(self, words: Sequence[str]) -> None:
        """Run a command as ``vitlab`` does.

        Raises:
            UserError: if it is refused.
        """
        with quiet() as (out, err), mock.patch.object(sys, "argv", ["vitlab", *words]):
            try:
                cli.main()
                code: Any = 0
            except SystemExit as exit_:
                code = exit_.code
        text = err.getvalue() + out.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
        assert "Traceback" not in err.getvalue() or GUARD.stopped, text
        assert PASSWORD not in text, f"the password is printed: {text}"
        if code == 2:
            raise UserError(err.getvalue())
        sound = code in (0, 1, 4, 5, None) or bool(GUARD.programs) or text.startswith("plugin file ")
        assert sound, f"exit code {code}: {text}"

    def examine(self, seed: str, index: int) -> tuple[str, str]:
        """Run one input, and return its ending and what is wrong."""
        if state(self.folder) != self.pristine:
            self.restore()
        make = self.makers[index % len(self.makers)]
        words = [word.replace("\0", "") for word in make(Random(f"{seed}:{index}"), self.folder)]  # as the system
        before = state(self.folder)
        with (
            mock.patch("vitlab.planning.study_folder.git_output", lambda *_: ""),
            mock.patch("vitlab.driver.scheduler.Schedule.run_jobs", read_data),
        ):
            ending, what = outcome(partial(self.call, words), self.folder, prevents=True)
        after = state(self.folder)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if any(Path(name).name == CANARY for name in changed):
            what = f"{what}\nthe input ran code"
        elif ending == "refused" and changed and not GUARD.programs:
            what = f"{what}\nrefused, but written: {changed}"
        elif GUARD.writes and make not in (commands, weights):  # which name the place
            what = f"{what}\nwritten elsewhere: {GUARD.writes}"
        return ("wrong", f"vitlab {' '.join(map(repr, words))}\n{what}") if what else (ending, "")


@contextmanager
def bench(kinds: Sequence[str]) -> Iterator[Examine]:
    """Enter a temporary folder for the inputs of some kinds, in turns."""
    before, temporary = os.getcwd(), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="fuzz-inputs-") as name, warnings.catch_warnings():
        root = Path(name).resolve()
        environment = {
            "XDG_CACHE_HOME": str(root / "here" / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(root / "here" / "cache"),
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        }
        with mock.patch.dict(os.environ, environment):
            logging.disable(logging.CRITICAL)
            warnings.simplefilter("ignore")
            try:
                instance = Bench(root, kinds)
                tempfile.tempdir = str(root / "here" / "tmp")
                yield instance.examine
            finally:
                logging.disable(logging.NOTSET)
                tempfile.tempdir = temporary
                os.chdir(before)


if __name__ == "__main__":
    chosen = [sys.argv.pop(1)] if sys.argv[1:2] and sys.argv[1] in KINDS else KINDS
    sys.exit(main(partial(bench, chosen), __doc__, 5000))
