"""Bases of published data sets: files that are found in a folder or fetched through torchvision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from vitlab.data.datasets import files
from vitlab.data.datasets.base import Dataset
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import DataError
from vitlab.geometry import DataInfo, Pair
from vitlab.registry import Unhashed

Paths = TypeVar("Paths")
"""The files of a data set: a folder, or paths by name."""


class Published(Dataset, Generic[Paths]):
    """Base of published data sets, whose files are found in a folder or fetched through torchvision.

    Args:
        root: folder that has the files, or has them in one of ``layouts``.
            None: ``$VITLAB_DATA``, ``data``, the user's cache, ``/usr/share/datasets``.
        download: ``missing`` fetches files that are not found; torchvision verifies their checksums.
    """

    name: ClassVar[str]
    torchvision_name: ClassVar[str]
    torchvision_options: ClassVar[Mapping[str, Any]] = {}
    layouts: ClassVar[tuple[str, ...]]  #: folders below the root that may hold the data

    def __init__(
        self,
        *,
        root: Annotated[str | None, Unhashed()] = None,
        download: Annotated[files.Download, Unhashed()] = "never",
    ) -> None:
        self.root = root
        self.download: files.Download = download

    def _find(self) -> Paths | None:
        """Return the files, or None if they are not here."""
        raise NotImplementedError

    def _names(self) -> list[str]:
        """Return the names of the files in the message that they are not here."""
        raise NotImplementedError

    def _folders(self) -> Iterator[Path]:
        return (base / layout for base in files.roots(self.root) for layout in (".", *self.layouts))

    def missing(self) -> str | None:
        """Return where the files belong, or None if they are there or may be downloaded."""
        if self.download == "missing" or self._find() is not None:
            return None
        return files.not_here(self.name, self.root, self.layouts, self._names())

    def _find_or_fetch(self) -> Paths:
        """Return the files, downloaded first where that is allowed.

        Raises:
            DataError: if they are not here.
        """
        if (reason := self.missing()) is not None:
            raise DataError(reason)
        if (paths := self._find()) is not None:
            return paths
        source = getattr(torchvision("torchvision.datasets"), self.torchvision_name)
        folder = files.download_folder(self.root)
        files.fetch(self.name, folder, lambda folder: source(str(folder), download=True, **self.torchvision_options))
        if (paths := self._find()) is None:
            raise DataError(f"{self.name}: the download to {folder} does not contain the expected files")
        return paths


class Checksummed(Published[dict[str, Path]]):
    """Base of published data sets of a few files with known checksums."""

    labels: ClassVar[tuple[str, ...]]
    published: ClassVar[Mapping[str, str]]  #: MD5 of each unpacked file, by name

    def _find(self) -> dict[str, Path] | None:
        return files.find(list(self._folders()), tuple(self.published))

    def _names(self) -> list[str]:
        return list(self.published)

    def _info(self, image: Pair, channels: int) -> DataInfo:
        """Return the facts of the data set, with the checksums of its files, or the published ones."""
        paths = self._find()
        checksums = self.published if paths is None else {name: files.checksum(path) for name, path in paths.items()}
        return DataInfo(
            image=image,
            channels=channels,
            classes=len(self.labels),
            identity=files.identity(self.name, checksums),
            labels=self.labels,
        )
