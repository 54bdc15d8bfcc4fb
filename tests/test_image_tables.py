"""Tests of pictures in tables: every container gives the batches of a folder of the same files, or a sentence.

Files are written by pyarrow, tarfile and csv, and by Hugging Face ``datasets`` where it is installed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from PIL import Image
from pyarrow import parquet

import vitlab
from vitlab.data import image_cache
from vitlab.data.prepare import DataSource, Feed, data_info, prepare
from vitlab.errors import DataError, OptionError, SpecError
from vitlab.lab import plan_study
from vitlab.spec import STREAMS
from vitlab.testing import check_component

SEEDS = dict.fromkeys(STREAMS, 0)
NAMES = ("cat", "dog", "eel")
TAGS: tuple[tuple[int, ...], ...] = ((0,), (0, 2), (), (1, 2))
COUNTS = {"train": 24, "validation": 6, "test": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder / "vitlab" / "data"


class Row:
    """A picture and its labels; the picture differs for every number."""

    def __init__(self, number: int) -> None:
        pixels = np.random.default_rng(number).integers(0, 256, (10, 12, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        self.number, self.content, self.pixels = number, file.getvalue(), pixels
        self.label, self.tags = number % 3, TAGS[number % 4]


ROWS = {
    split: [Row(1000 * place + number) for number in range(count)]
    for place, (split, count) in enumerate(COUNTS.items())
}


def hugging_face(**features: Any) -> dict[bytes, bytes]:
    """Return the metadata that ``datasets`` writes into the schema of Parquet and Arrow files."""
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def table(rows: Sequence[Row]) -> pa.Table:
    """Return rows as ``datasets`` stores them."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    classes = {"names": list(NAMES), "_type": "ClassLabel"}
    columns = {
        "image": pa.array([{"bytes": row.content, "path": None} for row in rows], kind),
        "label": pa.array([row.label for row in rows]),
        "tags": pa.array([list(row.tags) for row in rows], pa.list_(pa.int64())),
    }
    metadata = hugging_face(image={"_type": "Image"}, label=classes, tags={"feature": classes, "_type": "List"})
    return pa.table(columns).replace_schema_metadata(metadata)


def write_parquet(root: Path, split: str, rows: Sequence[Row]) -> None:
    (root / "data").mkdir(parents=True, exist_ok=True)
    parquet.write_table(table(rows), root / "data" / f"{split}-00000-of-00001.parquet", row_group_size=5)


def write_arrow(root: Path, split: str, rows: Sequence[Row]) -> None:
    folder = root / split
    folder.mkdir(parents=True)
    for name in ("data-00000-of-00001", "cache-0123456789abcdef"):  # the second is the library's own copy
        with pa.OSFile(str(folder / f"{name}.arrow"), "wb") as file, pa.ipc.new_stream(file, table(rows).schema) as out:
            out.write_table(table(rows), max_chunksize=7)


def write_bytes_column(root: Path, split: str, rows: Sequence[Row]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    columns = {
        "image": [row.content for row in rows],
        "label": [NAMES[row.label] for row in rows],
        "tags": [[NAMES[tag] for tag in row.tags] for row in rows],
    }
    parquet.write_table(pa.table(columns), root / f"{split}.parquet", compression="gzip")


def write_csv(root: Path, split: str, rows: Sequence[Row]) -> None:
    (root / "pictures").mkdir(parents=True, exist_ok=True)
    with open(root / f"{split}.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["image", "label", "tags", *NAMES])
        for row in rows:
            (root / "pictures" / f"{row.number}.png").write_bytes(row.content)
            tags = "; ".join(NAMES[tag] for tag in row.tags)
            marks = [int(index in row.tags) for index in range(3)]
            out.writerow([f"pictures/{row.number}.png", NAMES[row.label], tags, *marks])


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_tar(root: Path, split: str, rows: Sequence[Row]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        with tarfile.open(root / f"pics-{split}-{shard:06d}.tar", "w") as archive:
            for row in rows[shard::2] if split == "test" else rows[shard * len(rows) // 2 :][: len(rows) // 2]:
                add(archive, f"{row.number:06d}.png", row.content)
                add(archive, f"{row.number:06d}.cls", str(row.label).encode())
                add(archive, f"{row.number:06d}.json", json.dumps({"tags": row.tags}).encode())


Writer = Callable[[Path, str, Sequence[Row]], None]
NAMED = {"class_names": list(NAMES)}
WRITERS: dict[str, tuple[Writer, dict[str, Any], dict[str, Any]]] = {
    "parquet": (write_parquet, {}, {"label": "tags"}),
    "arrow": (write_arrow, {}, {"label": "tags"}),
    "bytes": (write_bytes_column, {}, {"label": "tags"}),
    "csv": (write_csv, {}, {"label": "tags", "label_separator": ";"}),
    "columns": (write_csv, {}, {"label": list(NAMES)}),
    "tar": (write_tar, {"label": "cls", **NAMED}, {"label": "json.tags", **NAMED}),
}


def data(root: Path, **options: Any) -> dict[str, Any]:
    return {"type": "image_table", "root": str(root), "image_size": [10, 12], "fit": "squash", **options}


def written(root: Path, writer: Writer, rows: dict[str, list[Row]] = ROWS) -> Path:
    for split, of_split in rows.items():
        writer(root, split, of_split)
    return root


@pytest.mark.parametrize("container", WRITERS)
def test_every_container_gives_the_pictures_and_labels_that_were_written(tmp_path: Path, container: str) -> None:
    writer, single, multi = WRITERS[container]
    root = written(tmp_path / "pics", writer)
    order = {split: list(rows) for split, rows in ROWS.items()}
    if container == "tar":
        order["test"] = [*order["test"][::2], *order["test"][1::2]]
    for options, task in ((single, "classification"), (multi, "multilabel")):
        choice = data(root, decoded="memory" if container == "parquet" else "never", **options)
        info = data_info(choice)
        assert (info.labels, info.task, info.image, info.channels) == (NAMES, task, (10, 12), 3)
        prepared = prepare(choice, SEEDS)
        for split, subset in zip(COUNTS, (prepared.train, prepared.val, prepared.test), strict=True):
            rows = order[split]
            assert np.array_equal(subset.x_NCHW.permute(0, 2, 3, 1), [row.pixels for row in rows])
            expected = [
                row.label if task == "classification" else [int(k in row.tags) for k in range(3)] for row in rows
            ]
            assert subset.y_N.tolist() == expected
        batch = Feed(prepared, [], SEEDS).batch(0, 8)
        assert batch.y_B.dtype == (torch.int64 if task == "classification" else torch.float32)
        if container == "bytes":
            check_component("dataset", choice)


def test_identity_is_that_of_pictures_and_labels_in_any_container(tmp_path: Path) -> None:
    identities = {
        name: data_info(data(written(tmp_path / name, writer), **single)).identity
        for name, (writer, single, _) in WRITERS.items()
        if name != "tar"  # its shards have the test rows in another order
    }
    assert len(set(identities.values())) == 1
    changed = {**ROWS, "test": [*ROWS["test"][:-1], Row(7)]}
    other = data_info(data(written(tmp_path / "changed", write_parquet, changed))).identity
    assert other not in identities.values()
    relabelled = [Row(row.number) for row in ROWS["train"]]
    relabelled[0].label = 2
    assert data_info(data(written(tmp_path / "labels", write_parquet, {**ROWS, "train": relabelled}))).identity not in (
        other,
        *identities.values(),
    )


def test_names_that_are_numbers_do_not_take_the_indices_of_others(tmp_path: Path) -> None:
    root, stars = written(tmp_path, write_parquet), ["1", "2", "3"]
    expected = DataSource(data(root)).dataset.pictures("test").y_N  # type: ignore[union-attr]
    for split in COUNTS:
        declare(split, *stars)(root)
    for options in ({}, {"class_names": stars}):
        source = DataSource(data(root, **options))
        assert source.info().labels == tuple(stars)
        assert torch.equal(source.dataset.pictures("test").y_N, expected)  # type: ignore[union-attr]
    for file in root.rglob("*.parquet"):
        cells = [label + 1 for label in parquet.read_table(file)["label"].to_pylist()]
        parquet.write_table(parquet.read_table(file).set_column(1, "label", pa.array(cells)), file)
    named = DataSource(data(root, class_names=stars)).dataset
    assert torch.equal(named.pictures("test").y_N, expected)  # type: ignore[union-attr]


def test_other_column_of_pictures_has_another_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.data.datasets.files.SETTLED_S", -60.0)  # so that identities are remembered at once
    root = written(tmp_path, write_bytes_column)
    for file in root.rglob("*.parquet"):
        columns = parquet.read_table(file)
        parquet.write_table(
            columns.append_column("other", columns["image"].take(pa.array(range(len(columns)))[::-1])), file
        )
    assert data_info(data(root)).identity != data_info(data(root, image="other")).identity


def test_files_of_hugging_face_datasets_are_read_as_by_that_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    classes = datasets.ClassLabel(names=list(NAMES))
    features = datasets.Features({"image": datasets.Image(), "label": classes, "tags": datasets.Sequence(classes)})
    written_by_library = datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict(
                {
                    "image": [Image.fromarray(row.pixels) for row in rows],
                    "label": [row.label for row in rows],
                    "tags": [list(row.tags) for row in rows],
                },
                features=features,
            )
            for split, rows in ROWS.items()
        }
    )
    written_by_library.save_to_disk(tmp_path / "disk")
    for split, one in written_by_library.items():
        one.to_parquet(str(tmp_path / "hub" / f"{split}-00000-of-00001.parquet"))
    for root in (tmp_path / "disk", tmp_path / "hub"):
        for label, task in (("label", "classification"), ("tags", "multilabel")):
            prepared = prepare(data(root, label=label), SEEDS)
            assert prepared.info.labels == NAMES and prepared.info.task == task
            theirs = datasets.load_from_disk(tmp_path / "disk")["test"]
            assert np.array_equal(prepared.test.x_NCHW.permute(0, 2, 3, 1), [np.array(one["image"]) for one in theirs])
            if task == "classification":
                assert prepared.test.y_N.tolist() == theirs["label"][:]


def test_data_set_of_the_hub_is_read_from_its_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout is that of huggingface_hub: links in a snapshot to blobs."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    here = written(tmp_path / "blobs", write_parquet)
    folder = tmp_path / "datasets--org--pics"
    (folder / "snapshots" / ("a" * 40) / "data").mkdir(parents=True)
    for file in (here / "data").iterdir():
        (folder / "snapshots" / ("a" * 40) / "data" / file.name).symlink_to(file)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    address = {"type": "image_table", "root": "hf://datasets/org/pics", "image_size": 8}
    expected = data_info({**data(here), "image_size": 8}).identity
    for part in ("", "@main", f"@{'a' * 40}/data", "/data", "/data/*.parquet"):
        assert data_info({**address, "root": f"{address['root']}{part}"}).identity == expected
    with pytest.raises(DataError, match="hf://datasets/pics is no data set; write hf://datasets/ORGANISATION/NAME"):
        data_info({**address, "root": "hf://datasets/pics"})
    for options in ({}, {"download": "missing"}):
        reason = DataSource({**address, "root": "hf://datasets/org/none@v1", **options}).missing() or ""
        assert reason.startswith("image_table: org/none is not here: ")
        assert ("'download: missing'" in reason) == (not options), "what is set is not advised"


def test_rows_of_a_table_are_mapped_and_copied_once(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "pics"
    (root / "train").mkdir(parents=True)
    noise = [np.random.default_rng(number).bytes(1 << 18) for number in range(32)]
    columns = {"image": [ROWS["train"][0].content + content for content in noise], "label": [0, 1] * 16}
    parquet.write_table(pa.table(columns), root / "train" / "0.parquet", row_group_size=8)
    before = pa.total_allocated_bytes()
    source = DataSource(data(root, test=0.25))
    assert source.info().classes == 2 and pa.total_allocated_bytes() - before < 1 << 20
    copies = {path: path.stat().st_mtime_ns for path in (cache / "tables").iterdir()}
    assert [path.suffix for path in copies] == [".arrow"]
    assert DataSource(data(root, test=0.5)).info().classes == 2
    assert {path: path.stat().st_mtime_ns for path in (cache / "tables").iterdir()} == copies
    assert source.check_pictures_and_note()[1].startswith("The test split is 0.25 of the pictures of each class in")


def test_one_table_is_split_by_a_share_and_other_files_are_named(tmp_path: Path) -> None:
    write_csv(tmp_path, "labels", [row for rows in ROWS.values() for row in rows])
    for root in (tmp_path, tmp_path / "labels.csv"):
        whole = DataSource(data(root, test=0.5))
        assert whole.check_pictures_and_note()[0].endswith("train 18 pictures of 3 classes, test 20, in 1 file.")
    root = written(tmp_path / "more", write_parquet)
    (root / "beside.parquet").write_bytes(b"")
    assert (
        DataSource(data(root)).check_pictures_and_note()[1]
        == f"Files whose names say no split are not read: '{root}/beside.parquet'."
    )


def test_validation_rows_are_the_test_split_if_there_is_no_other(tmp_path: Path) -> None:
    rows = {split: of_split for split, of_split in ROWS.items() if split != "test"}
    source = DataSource(data(written(tmp_path, write_parquet, rows)))
    assert source.check_pictures_and_note()[0].endswith(
        "train 24 pictures of 3 classes, test 6 (the val rows), in 2 files."
    )


def test_equal_pictures_of_two_splits_are_counted(tmp_path: Path) -> None:
    rows = {"train": ROWS["train"], "test": [*ROWS["test"], *ROWS["train"][:2]]}
    notes = DataSource(data(written(tmp_path, write_tar, rows), label="cls")).check_pictures_and_note()
    assert "2 of 10 test pictures are also in train, byte for byte." in notes


def break_cell(column: str, value: Any, row: int = 3) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "data" / "test-00000-of-00001.parquet"
        content = parquet.read_table(path)
        cells = content[column].to_pylist()
        cells[row] = value
        at = content.column_names.index(column)
        kind = content[column].type if not isinstance(value, str) else pa.string()
        cells = [str(cell) for cell in cells] if isinstance(value, str) else cells
        parquet.write_table(content.set_column(at, column, pa.array(cells, kind)), path)

    return change


def truncate(name: str, keep: float) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = next(root.rglob(name))
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    return change


def overwrite(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = next(root.rglob(name))
        path.write_bytes(path.read_bytes().replace(old, new))

    return change


def declare(split: str, *names: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = next(root.rglob(f"{split}*.parquet"))
        classes = hugging_face(label={"names": names, "_type": "ClassLabel"})
        parquet.write_table(parquet.read_table(path).replace_schema_metadata(classes), path)

    return change


def again(path: Path) -> None:
    with tarfile.open(path, "a") as archive:
        add(archive, "002000.jpg", ROWS["test"][0].content)


@pytest.mark.parametrize(
    ("container", "harm", "options", "message"),
    [
        ("parquet", None, {"label": "labels", "image": "pic"}, r"it has no column 'pic', 'labels', but 'image', 'label', 'tags'. Did you mean 'label'\?; correct"),
        ("csv", None, {"image": "zzz"}, r"it has no column 'zzz', but .*'eel'; correct the options or the file$"),
        ("parquet", None, {"image": "label"}, r"cannot be read: its pictures are int64; allowed: bytes, {bytes, path}"),
        ("parquet", None, {"test": 0.2}, "has test rows; remove the option 'test'"),
        ("parquet", None, {"class_names": ["a", "b"]}, r"none of the 2 classes in '.*row \d+: 2', .*; correct it"),
        ("parquet", break_cell("label", 7), {}, r"the label is none of the 3 classes in '.*test.*, row 3: 7'; correct"),
        ("parquet", break_cell("label", None), {}, r"no label in '.*test-00000-of-00001.parquet, row 3'; correct it"),
        ("parquet", break_cell("label", "owl"), {}, r"none of the 3 classes in '.*, row 3: owl'"),
        ("bytes", overwrite("train.parquet", b"PAR1", b"PARX"), {}, r"train.parquet cannot be read: Parquet magic bytes"),
        ("parquet", truncate("train*.parquet", 0.5), {}, r"train-00000-of-00001.parquet cannot be read: Parquet magic"),
        ("arrow", truncate("data*.arrow", 0.5), {}, r"data-00000-of-00001.arrow cannot be read: .*; correct the options or"),
        ("tar", truncate("*train*0.tar", 0.5), {}, r"pics-train-000000.tar cannot be read: .*"),
        ("tar", truncate("*train*0.tar", 0.0), {}, r"pics-train-000000.tar cannot be read: empty file"),
        ("tar", overwrite("*train*0.tar", b"000003.png", b"\xff00003.png"), {}, r"damaged or truncated at byte [\d,]+;"),
        ("tar", None, {"label": "txt"}, r"pics-test-000000.tar cannot be read: sample '002000' has no txt; members end in 'cls', 'json', 'png'; correct"),
        ("tar", None, {"label": "json.tag"}, r"cannot be read: 'tag'"),
        ("csv", overwrite("test.csv", b",dog,", b",,"), {}, r"no label in '.*test.csv, row \d'"),
        ("columns", None, {"label": list(NAMES), "class_names": ["a", "b"]}, "'class_names' has 2 names, and 'label' names 3 columns; name each"),
        ("parquet", declare("test", "eel", "dog", "cat"), {}, "different classes, or in another order: 'cat', 'dog', 'eel'; 'eel'"),
        ("tar", lambda root: again(root / "pics-test-000000.tar"), {}, "sample '002000' has several pictures; name the ending"),
        ("csv", lambda root: (root / "pictures/5.png").unlink(), {}, r"there is no such file in '.*train.csv, row 5: .*5.png'"),
        ("csv", overwrite("test.csv", b"dog", b"dgo"), {}, r"none of the 3 classes of training rows in '.*: dgo'"),
        ("csv", overwrite("train.csv", b"cat", b"12"), {}, r"labels are numbers and names, first in .*train.csv, row \d; w"),
        ("columns", overwrite("test.csv", b",1\r\n", b",2\r\n"), {"label": ["cat", "eel"]}, r"'eel' is neither 0 nor 1 in '.*: 2'"),
        ("csv", lambda root: os.rename(root / "test.csv", root / "test_train.csv"), {}, "test_train.csv names several splits"),
        ("csv", lambda root: [path.unlink() for path in root.glob("[vt][ae][ls]*.csv")], {}, "has no test rows: the names of"),
        ("csv", lambda root: (root / "train.csv").unlink(), {}, "has no train rows: the names of files or folders say"),
        ("csv", lambda root: [path.unlink() for path in root.glob("*.csv")], {}, r"has no file .parquet or .arrow or .csv or .tar"),
    ],
)  # fmt: skip
def test_mistakes_are_sentences_with_their_place(
    tmp_path: Path, container: str, harm: Callable[[Path], None] | None, options: dict[str, Any], message: str
) -> None:
    writer, single, _ = WRITERS[container]
    root = written(tmp_path / "pics", writer)
    if harm is not None:
        harm(root)
    with pytest.raises(DataError, match=message) as caught:
        data_info(data(root, **{**single, **options}))
    assert str(caught.value).startswith("image_table: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["label", "class_names"])
def test_name_that_is_listed_twice_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(OptionError, match=f"{option}: cat is listed twice"):
        data_info(data(tmp_path, **{option: ["cat", "eel", "cat"]}))


def test_damaged_and_missing_pictures_are_named_before_the_first_trial(tmp_path: Path) -> None:
    root = written(tmp_path, write_parquet)
    break_cell("image", {"bytes": None, "path": "gone.png"}, row=2)(root)
    break_cell("image", {"bytes": ROWS["test"][5].content[:60], "path": None}, row=5)(root)
    with pytest.raises(DataError) as caught:
        DataSource(data(root)).check_pictures_and_note()
    assert str(caught.value).startswith("image_table: 2 of 38 pictures cannot be read; replace or delete them: ")
    assert f"{root}/data/test-00000-of-00001.parquet, row 2 (cannot identify image file); " in str(caught.value)


def test_parquet_of_paths_without_content_reads_the_files(tmp_path: Path) -> None:
    """``datasets`` writes a folder of pictures so: their paths, and null in place of bytes."""
    (tmp_path / "tables").mkdir()
    for split, rows in ROWS.items():
        content, paths = table(rows), [{"bytes": None, "path": str(tmp_path / f"{row.number}.png")} for row in rows]
        for row, place in zip(rows, paths, strict=True):
            Path(str(place["path"])).write_bytes(row.content)
        content = content.set_column(0, "image", pa.array(paths, content["image"].type))
        parquet.write_table(content, tmp_path / "tables" / f"{split}.parquet")
    prepared = prepare(data(tmp_path / "tables"), SEEDS)
    for rows, subset in zip(ROWS.values(), (prepared.train, prepared.val, prepared.test), strict=True):
        assert np.array_equal(subset.x_NCHW.permute(0, 2, 3, 1), [row.pixels for row in rows])


def test_missing_root_is_data_that_is_not_here(tmp_path: Path) -> None:
    source = DataSource(data(tmp_path / "nowhere"))
    assert (
        source.missing()
        == f"image_table: there is no '{tmp_path}/nowhere'; correct 'root', a local path or hf://datasets/..., or add what is missing"
        and source.check_pictures_and_note() == []
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "pics-{train,validation,test}-{000000..000001}.tar",
        "pics-*.tar",
        "{pics-train-{000000..000001},pics-[vt][ae][sl]*}.tar",
    ],
)
def test_pattern_of_shards_is_the_folder(tmp_path: Path, pattern: str) -> None:
    root = written(tmp_path, write_tar)
    (tmp_path / "README.md").write_text("no shard")
    whole, matched = (DataSource(data(place, label="cls", **NAMED)) for place in (root, root / pattern))
    assert matched.missing() is None and matched.info() == whole.info()


def test_shards_of_a_pattern_that_do_not_exist_are_named(tmp_path: Path) -> None:
    root = written(tmp_path, write_tar)
    source = DataSource(data(root / "pics-{train,dev}-{000000..000002}.tar", label="cls", **NAMED))
    gone = [f"'{root}/pics-{name}.tar'" for name in ("train-000002", "dev-000000", "dev-000001", "dev-000002")]
    assert (
        source.missing()
        == f"image_table: there is no {', '.join(gone)}; correct 'root', a local path or hf://datasets/..., or add what is missing"
    )
    (root / "pics-{a}.tar").touch()
    assert DataSource(data(root / "pics-{a}.tar")).missing() is None, "a name with braces is a name where it exists"


@pytest.mark.parametrize("numbers", ["5..1", "0..9999999999", f"0..{'9' * 30}"])
def test_range_of_no_or_too_many_shards_is_refused(tmp_path: Path, numbers: str) -> None:
    source = DataSource(data(tmp_path / f"pics-{{{numbers}}}.tar"))
    assert f"image_table: {{{numbers}}} is not a range of 1 to 100,000 rising numbers" in (source.missing() or "")


def study(root: Path, **changes: Any) -> Path:
    base = {
        "data": data(root, label="tags"),
        "model": {"type": "vit", "patch_size": 2, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 2, "batch_size": 4, "loss": "bce", **changes.pop("train", {})},
    }
    base["data"] |= changes
    file = root / "study.yaml"
    file.write_text(yaml.safe_dump({"study": "s", "base": base, "seeds": 1, "analysis": {"metric": "val/map"}}))
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"loss": "cross_entropy"}}, "loss 'cross_entropy' is for classification and segmentation, .*write loss: bce"),
        ({"train": {"mix": {"mixup": 0.2}}}, "train.mix needs classification, and the task of this data is multilabel"),
        ({"train": {"metrics": ["accuracy"]}}, "metric 'accuracy' is for classification, not multilabel"),
        ({"classes": [0, 1]}, "'classes' selects images by class, and image_table has any number of classes an image"),
        ({"per_class": 2}, "'per_class' selects images by class"),
        ({"corrupted": "all"}, "'corrupted' measures the error of images by class"),
    ],
)  # fmt: skip
def test_what_needs_one_class_an_image_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = study(written(tmp_path, write_parquet), **changes)
    with pytest.raises(SpecError, match=message):
        plan_study(file)


def test_metric_of_another_task_is_not_advised(tmp_path: Path) -> None:
    file = study(written(tmp_path, write_parquet))
    with pytest.raises(SpecError, match="no trial reports val/accuracy") as raised:
        plan_study(file, changes={"analysis.metric": "val/accuracy"})
    assert "val/map" in str(raised.value) and "train.metrics" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.usefixtures("no_report", "unpainted")
def test_study_of_several_labels_reports_and_explains_each(tmp_path: Path) -> None:
    file = study(written(tmp_path / "pics", write_parquet))
    run = {"run.executor": "inline", "run.tracker": "none", "run.explain": [0]}
    answer = vitlab.run(file, out=tmp_path / "out", changes=run)
    trial = answer.plan.trials[0].trial
    folder = answer.store.trial(trial.key, trial.code)
    result = folder.result()
    assert result is not None and {"val/map", "val/micro_f1", "test/macro_f1", "test/loss"} <= set(
        result.outcome.metrics
    )
    assert set(pd.read_parquet(folder.predictions)) == {"split", "id", "loss"}
    predictions = pd.read_csv(folder.path / "explain" / "test-0" / "predictions.csv").set_index("label")
    assert predictions["true"].to_dict() == {name: index in ROWS["test"][0].tags for index, name in enumerate(NAMES)}
    assert predictions["probability"].between(0.2, 0.8).all() and predictions["probability"].sum() > 1.05


def test_set_in_memory_is_decoded_once_for_all_workers(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = written(tmp_path, write_parquet)
    monkeypatch.setattr("vitlab.data.prepare._cache", type("Forgetful", (dict,), {"popitem": lambda *_, **__: None})())
    first = prepare(data(root), SEEDS)
    assert first.train.stored is None, "batches are taken from a tensor, whose pages all workers share"
    monkeypatch.setattr("vitlab.data.prepare._cache", type("Forgetful", (dict,), {"popitem": lambda *_, **__: None})())
    monkeypatch.setattr(image_cache.StoredImages, "fill", lambda *_: pytest.fail("decoded again"))
    again = prepare(data(root), SEEDS)
    assert torch.equal(first.train.x_NCHW, again.train.x_NCHW) and len(list((cache / "decoded").glob("*.npy"))) == 2
    again.train.pixels_MCHW[:] = 0  # type: ignore[index]
    monkeypatch.setattr("vitlab.data.prepare._cache", type("Forgetful", (dict,), {"popitem": lambda *_, **__: None})())
    assert torch.equal(prepare(data(root), SEEDS).train.x_NCHW, first.train.x_NCHW), "a write stays in its process"


def test_plan_says_how_large_a_decoded_set_is_and_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = written(tmp_path, write_parquet)
    monkeypatch.setattr(image_cache, "measure_seconds_per_picture", lambda pictures: 0.5)
    pattern = f"The 38 pictures of image_table are cached decoded in {image_cache.decoded_folder()} for all workers: 0.0 GiB, "
    assert DataSource(data(root)).check_pictures_and_note()[-1].startswith(f"{pattern}about 19 s of one core, ")
