"""``image_table``: pictures and labels in rows of Parquet, Arrow and CSV files, and in tar archives of WebDataset.

No file is read into memory as a whole.  Arrow files are mapped.  The rows of a Parquet file, and the places of the
pictures in a tar archive, are copied once to an Arrow file in the user's cache, which every process maps.

N rows of all files, K classes.
"""

import hashlib
import json
import os
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from vitlab.data.datasets import files
from vitlab.data.datasets.base import dataset, require_distinct
from vitlab.data.datasets.pictures import (
    TEST,
    TRAIN,
    VAL,
    EncodedPictures,
    Listing,
    PictureSet,
    is_hidden,
    picture_suffixes,
    quote_names,
)
from vitlab.errors import DataError, first_sentence, format_count, nearest, one_line
from vitlab.registry import Unhashed

WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
"""Words in names of files that name a split."""

SUFFIXES = (".parquet", ".arrow", ".csv", ".tar")

HUB = "hf://datasets/"
"""Beginning of the address of a data set on the Hugging Face hub, as in its library."""

BATCH = 64  #: rows of a Parquet file that are copied at once

Names = Annotated[list[str], Field(min_length=2), AfterValidator(require_distinct)]


class Rows(NamedTuple):
    """The rows of a file."""

    table: Any  #: pyarrow.Table of the labels
    open: Callable[[int], bytes]  #: returns the encoded picture of a row; empty if there is none
    places: Sequence[str]  #: what messages call the rows
    beside: Sequence[Path] = ()  #: further files that have the pictures


@dataclass(eq=False, kw_only=True)
class TablePictures(EncodedPictures):
    """The pictures in the rows of some files, one file after another."""

    parts: Sequence[Rows]

    def __post_init__(self) -> None:
        self._starts = list(accumulate((len(part.places) for part in self.parts), initial=0))

    def open(self, index: int) -> bytes:
        part = bisect_right(self._starts, index) - 1
        return self.parts[part].open(index - self._starts[part])


@dataset.register("image_table")
@dataclass(kw_only=True)
class ImageTable(PictureSet):
    """Pictures and labels in rows of Parquet, Arrow (Hugging Face ``datasets``) and CSV files, or of WebDataset tars.

    The name of a file, or of its folder, says its split by a word: ``train``, ``val`` (``validation``, ``valid``) or
    ``test``.  Without test rows, the validation rows are the test split.  A label is the name of a class, or its index
    where names are known.  Lists of labels, and columns of 0 and 1, are multi-label: any number of classes a picture.

    Args:
        root: file or folder, such as one that ``datasets`` wrote by ``save_to_disk``; a pattern of files, such as
            ``shards/{train,val}-{000..146}.tar`` or ``shards/*.tar``, all of which must exist; or a data set of the
            Hugging Face hub, ``hf://datasets/ORGANISATION/NAME@REVISION/FOLDER``, read from its local cache; the last
            two parts are optional, and the last may be a pattern of files as well.
        download: ``missing`` fetches a data set of the hub that is not in the cache, already when a study is planned.
        image: column of encoded pictures, bytes or ``{bytes, path}``, or of the names of files beside the table.  In a
            tar archive it is ``image`` for the members that Pillow decodes, or their ending.
        label: column of the class or of a list of classes; or several columns of 0 and 1, one for each class.  In a tar
            archive it is the ending of a text, such as ``cls``, or a key of a JSON text, such as ``json.label``.
        label_separator: text between the classes of a cell that has several.
        class_names: names of the classes by index; by default those that the files declare, else the different labels
            of the training rows, sorted.
    """

    kind = "image_table"

    root: Annotated[str, Unhashed()]
    download: Annotated[files.Download, Unhashed()] = "never"
    image: str = "image"
    label: str | Names = "label"
    label_separator: Annotated[str, Field(min_length=1)] | None = None
    class_names: Names | None = None

    @cached_property  # of the hub, each look-up asks the network
    def where(self) -> Path:
        """The file or folder; of the hub, the folder in the local cache."""
        return (
            self._download_snapshot(self.root.removeprefix(HUB))
            if self.root.startswith(HUB)
            else files.expand_home(self.root)
        )

    def missing(self) -> str | None:
        try:
            lacking = (
                [] if self.where.exists() else [text for text, found in self._match_pattern().items() if not found]
            )
        except DataError as error:
            return str(error)
        return (
            f"image_table: there is no {quote_names(lacking)}; correct 'root', a local path or {HUB}..., "
            "or add what is missing"
            if lacking
            else None
        )

    def _match_pattern(self) -> dict[str, list[Path]]:
        """Return the files of each text that ``root`` stands for once its braces are expanded."""
        return {text: [*map(Path, glob(text, recursive=True))] for text in files.expand_braces(str(self.where))}

    def scan(self) -> Listing:
        import pandas as pd

        labels = [self.label] if isinstance(self.label, str) else self.label
        paths, unread = self._find_table_files()
        parts = [self._read_rows(path, labels) for path in paths]
        places = [place for part in parts for place in part.places]
        frame = pd.concat([part.table.to_pandas(integer_object_nulls=True) for part in parts], ignore_index=True)
        split_N = pd.Series([split for split, part in zip(paths.values(), parts, strict=True) for _ in part.places])
        splits = {str(split): torch.tensor(rows) for split, rows in split_N.groupby(split_N).groups.items()}
        remark = self._check_and_use_val_for_test(splits)
        names, y_N = self._encode_classes(frame, places, dict(zip(paths, parts, strict=True)), splits[TRAIN].tolist())
        splits, notes = self.hold_out_test_split(splits, y_N, str(self.where))
        return Listing(
            TablePictures(places, y_N, self.decoding, self.decoded, parts=parts),
            names,
            splits,
            keys=[f"{index} {names[index]}" for index in y_N.tolist()]
            if y_N.ndim == 1
            else [str([(index, name) for index, name in enumerate(names) if y_K[index]]) for y_K in y_N.tolist()],
            files=[*paths, *(path for part in parts for path in part.beside)],
            column=self.image,
            remark=remark,
            rest=f", in {format_count(len(paths), 'file')}",
            notes=(*unread, *notes),
        )

    def _find_table_files(self) -> tuple[dict[Path, str], list[str]]:
        """Return the files and the split of each, and a note on those that are not read."""
        root = self.where
        if root.is_file():
            return {root: TRAIN}, []
        found = [*root.rglob("*")]
        if not root.exists():
            found = [*chain.from_iterable(self._match_pattern().values())]
            root = Path(os.path.commonpath([path.parent for path in found]))
        paths = {}
        for path in sorted(found):
            name = path.relative_to(root)
            # Copies that the library datasets makes beside its files are named cache-*.
            if path.suffix not in SUFFIXES or any(map(is_hidden, name.parts)) or name.name.startswith("cache-"):
                continue
            splits = {WORDS[word] for word in re.split(r"[\W_]+", str(name).lower()) if word in WORDS}
            if len(splits) > 1:
                raise DataError(f"image_table: {path} names several splits; rename it")
            paths[path] = splits.pop() if splits else ""
        if not paths:
            raise DataError(f"image_table: {root} has no file {' or '.join(SUFFIXES)}; correct 'root'")
        if not any(paths.values()):
            return dict.fromkeys(paths, TRAIN), []
        unnamed = [str(path) for path, split in paths.items() if not split]
        notes = [f"Files whose names say no split are not read: {quote_names(unnamed)}."] if unnamed else []
        return {path: split for path, split in paths.items() if split}, notes

    def _check_and_use_val_for_test(self, splits: dict[str, Tensor]) -> str:
        """Check that there are rows to train and test on, and return the remark that validation rows are the latter."""
        if TEST in splits and self.test is not None:
            raise DataError(f"image_table: {self.where} has test rows; remove the option 'test'")
        tests = TEST in splits or self.test is not None
        if TRAIN not in splits or not (tests or VAL in splits):
            raise DataError(
                f"image_table: {self.where} has no {'test' if TRAIN in splits else 'train'} rows: the names of files "
                "or folders say the split; or set 'test: 0.2' to test on a share of train"
            )
        if tests:
            return ""
        splits[TEST] = splits.pop(VAL)
        return " (the val rows)"

    def _read_rows(self, path: Path, columns: Sequence[str]) -> Rows:
        import pandas as pd
        import pyarrow as pa
        from pyarrow import parquet

        def check(present: Sequence[str]) -> None:
            if lacking := [column for column in (self.image, *columns) if column not in present]:
                hints = "".join(nearest(column, present) for column in lacking)
                raise ValueError(
                    f"it has no column {quote_names(lacking)}, but {quote_names(present)}{hints and '.'}{hints}"
                )

        try:
            match path.suffix:
                case ".tar":
                    table = _read_through_arrow_cache(
                        path, f"{self.image} {columns}", lambda: _read_tar_samples(path, self.image, columns)
                    )
                    places = [f"{path}:{key}" for key in table["#key"].to_pylist()]
                    return Rows(table.select(columns), _make_picture_reader(path, table["#image"]), places)
                case ".parquet":
                    file = parquet.ParquetFile(path, memory_map=True)
                    check(file.schema_arrow.names)
                    to_read = [self.image, *columns]
                    table = _read_through_arrow_cache(
                        path, str(to_read), lambda: file.iter_batches(BATCH, columns=to_read)
                    )
                case ".arrow":
                    table = _map_arrow_file(path)
                case _:
                    cells = pd.read_csv(path, dtype=str, keep_default_na=False)
                    table = pa.Table.from_pandas(cells, preserve_index=False)
            check(table.column_names)
            pictures, places = table[self.image], [f"{path}, row {row}" for row in range(len(table))]
            if pa.types.is_struct(pictures.type) and not pa.compute.struct_field(pictures, "bytes").drop_null():
                pictures = pa.compute.struct_field(pictures, "path")  # datasets wrote names of files, without content
            if pa.types.is_string(pictures.type) or pa.types.is_large_string(pictures.type):
                names = [path.parent / str(name) for name in pictures.to_pylist()]
                _refuse_places(places, [not name.is_file() for name in names], "there is no such file", names)
                return Rows(table.select(columns), lambda row: names[row].read_bytes(), places, names)
            return Rows(table.select(columns), _make_picture_reader(path, pictures), places)
        except (pa.ArrowException, tarfile.TarError, OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"image_table: {path} cannot be read: {one_line(error)}; correct the options or the file"
            ) from None

    def _encode_classes(
        self, frame: Any, places: Sequence[str], parts: Mapping[Path, Rows], train: Sequence[int]
    ) -> tuple[Sequence[str], Tensor]:
        """Return the names of the classes, and the classes of every row."""
        import pandas as pd
        import pyarrow as pa

        label = self.label
        if not isinstance(label, str):
            of_columns = self.class_names or label
            if len(of_columns) != len(label):
                raise DataError(
                    f"image_table: 'class_names' has {format_count(len(of_columns), 'name')}, and 'label' names "
                    f"{format_count(len(label), 'column')}; name each"
                )
            marks = frame[label].astype(str).replace({"True": "1", "False": "0", "1.0": "1", "0.0": "0"})
            for name in label:
                _refuse_places(places, ~marks[name].isin(("0", "1")), f"'{name}' is neither 0 nor 1", marks[name])
            return of_columns, torch.from_numpy(marks.astype("uint8").to_numpy())
        cells, schema = frame[label], next(iter(parts.values())).table.schema
        several = self.label_separator is not None or pa.types.is_nested(schema.field(label).type)
        is_blank = cells.isna() if several else cells.isna() | (cells.astype(str).str.strip() == "")
        _refuse_places(places, is_blank, "no label")
        if self.label_separator is not None:
            cells = cells.astype(str).str.split(self.label_separator, regex=False)
        tokens = cells.explode().dropna().astype(str).str.strip()
        if several:
            tokens = tokens[tokens != ""]
        names, why = self.class_names or _require_equal_classes(parts, label), ""
        if not names:
            of_train, why = tokens[tokens.index.isin(train)], " of training rows"
            are_numbers = of_train.str.fullmatch(r"\d+")
            if are_numbers.nunique() > 1:
                row = of_train.index[are_numbers != are_numbers.iloc[0]][0]
                raise DataError(f"image_table: labels are numbers and names, first in {places[row]}; write all alike")
            names = sorted(of_train.unique(), key=int if are_numbers.all() else str)
            if len(names) < 2:
                raise DataError(f"image_table: {self.where} has {format_count(len(names), 'label')}; it needs 2")
        index_M = pd.Index(names).get_indexer(tokens)
        if not why:
            # Names may be numbers, such as '1' for index 0, so what all labels can be decides.  A file that declares
            # names has indices.
            by_index_M = pd.RangeIndex(len(names)).astype(str).get_indexer(tokens)
            ways = (index_M, by_index_M) if self.class_names else (by_index_M, index_M)
            index_M = max(ways, key=lambda way: (way >= 0).sum())
        what = f"the label is none of the {len(names)} classes{why}"
        _refuse_places([places[row] for row in tokens.index], index_M < 0, what, tokens)
        if not several:
            return names, torch.tensor(index_M)
        y_NK = torch.zeros(len(frame), len(names), dtype=torch.uint8)
        y_NK[torch.tensor(tokens.index), torch.tensor(index_M)] = 1
        return names, y_NK

    def _download_snapshot(self, address: str) -> Path:
        try:
            from huggingface_hub import snapshot_download
        except ImportError:
            raise DataError(f"image_table: {HUB} needs a library; run: pip install huggingface_hub") from None
        match = re.fullmatch(r"([^/@]+/[^/@]+)(?:@([^/]+))?/?(.*)", address)
        if match is None:
            raise DataError(f"image_table: {HUB}{address} is no data set; write {HUB}ORGANISATION/NAME")
        name, revision, folder = match.groups()
        patterns, local = [] if folder[-1:] in ("", "/") else files.expand_braces(folder), self.download == "never"
        patterns += [f"{folder}*{suffix}" for suffix in SUFFIXES]  # if it is no pattern
        try:
            root = snapshot_download(
                name, repo_type="dataset", revision=revision, allow_patterns=patterns, local_files_only=local
            )
        except (OSError, ValueError) as error:  # what the library raises for networks, names and an empty cache
            remedy = "allow fetching it by 'download: missing'"
            if not local:
                remedy = (
                    f"fetching it failed: {first_sentence(error.__cause__ or error)}; check the name and the connection"
                )
            raise DataError(
                f"image_table: {name} is not here: it is not in the cache of huggingface_hub; {remedy}"
            ) from None
        return Path(root, folder)


def _refuse_places(
    places: Sequence[str], wrong: Iterable[bool], what: str, cells: Iterable[object] | None = None
) -> None:
    """Raise a DataError that lists the places, and the cells, where something is wrong, if there are any."""
    all_cells = places if cells is None else [f"{place}: {cell}" for place, cell in zip(places, cells, strict=True)]
    if bad_places := [place for place, is_wrong in zip(all_cells, wrong, strict=True) if is_wrong]:
        raise DataError(f"image_table: {what} in {quote_names(bad_places)}; correct it")


def _read_tar_samples(path: Path, image: str, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the samples of a tar archive, consecutive members of one name, as batches of labels and places."""
    import pyarrow as pa

    samples: dict[str, dict[str, Any]] = {}
    endings: set[str] = set()
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            match = re.fullmatch(r"((?:.*/)?[^./][^./]*)\.([^/]+)", member.name)
            if not member.isfile() or match is None:
                continue
            sample, ending = samples.setdefault(match[1], {"#key": match[1]}), match[2].lower()
            endings.add(ending)
            if ending == image or (image == "image" and f".{ending}" in picture_suffixes()):
                if "#image" in sample:
                    raise ValueError(f"sample '{match[1]}' has several pictures; name the ending of one by 'image'")
                sample["#image"] = {"start": member.offset_data, "size": member.size}
            for column in columns:
                name, _, key = column.partition(".")
                if ending == name:
                    content = archive.extractfile(member).read()  # type: ignore[union-attr]  # a file has content
                    sample[column] = json.loads(content)[key] if key else content.decode()
        with open(path, "rb") as file:
            file.seek(archive.offset)
            # tarfile ends in silence where a header is damaged or cut off.
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ValueError(f"it is damaged or truncated at byte {archive.offset:,}")
    for key, sample in samples.items():
        for name in {"#image", *columns}.difference(sample):
            raise ValueError(
                f"sample '{key}' has no {name.replace('#image', 'picture')}; members end in "
                f"{quote_names(sorted(endings))}"
            )
    yield pa.RecordBatch.from_pylist(list(samples.values()))


def _require_equal_classes(parts: Mapping[Path, Rows], column: str) -> list[str] | None:
    """Return the class names of a column that files declare, which must be equal; None if there are none."""
    declared = {path: names for path, part in parts.items() if (names := _declared_classes(part.table.schema, column))}
    for path, names in declared.items():
        first, expected = next(iter(declared.items()))
        if names != expected:
            raise DataError(
                f"image_table: {path} and {first} declare different classes, or in another order: "
                f"{quote_names(names)}; {quote_names(expected)}; write the files with one list"
            )
    return next(iter(declared.values()), None)


def _declared_classes(schema: Any, column: str) -> list[str] | None:
    """Return the class names of a column that Hugging Face ``datasets`` wrote into a schema; None if there are none."""
    try:
        content = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature = content.get("info", {}).get("features", {}).get(column, {})
        feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)  # of a list of classes
        return feature.get("names")
    except (ValueError, LookupError, AttributeError):  # another program's text
        return None


def _make_picture_reader(path: Path, column: Any) -> Callable[[int], bytes]:
    """Return a function that returns the picture of a row of bytes, of ``{bytes, path}``, or of places in the file."""
    import pyarrow as pa

    if pa.types.is_struct(column.type) and column.type.get_field_index("start") >= 0:
        places = column.to_pylist()

        def read(row: int) -> bytes:
            with open(path, "rb") as file:
                file.seek(places[row]["start"])
                return file.read(places[row]["size"])

        return read
    if pa.types.is_struct(column.type):
        column = pa.compute.struct_field(column, "bytes")
    if not pa.types.is_binary(column.type) and not pa.types.is_large_binary(column.type):
        raise ValueError(f"its pictures are {column.type}; allowed: bytes, {{bytes, path}}, or names of files")
    return lambda row: column[row].as_py() or b""


def _map_arrow_file(path: Path) -> Any:
    """Return the table in an Arrow file, a stream of record batches, without reading it into memory."""
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def _read_through_arrow_cache(path: Path, cache_key: str, batches: Callable[[], Iterable[Any]]) -> Any:
    """Return record batches of a file, mapped from an Arrow file in the user's cache that is written once."""
    import pyarrow as pa

    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {cache_key}"
    target = files.cache_folder() / "tables" / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.arrow"
    if not target.is_file():
        files.make_and_prune_folder(target.parent)
        temporary = target.with_suffix(f".{os.getpid()}")
        try:
            with open(temporary, "wb") as file:
                writer = None
                for batch in batches():
                    writer = writer or pa.ipc.new_stream(file, batch.schema)
                    writer.write_batch(batch)
                if writer is None:
                    raise ValueError("it has no rows")
                writer.close()
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return _map_arrow_file(target)
