"""Sets of right classes of test pictures, as of ImageNet-ReaL (arXiv:2006.07159)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.errors import DataError


def read_real_labels(file: Path, pictures: Sequence[str]) -> list[frozenset[int]]:
    """Return the set of right classes of each picture, empty for one without.

    Args:
        file: JSON, a list of lists of class indices, whose n-th list is of the picture whose name ends in the number n
            (from 1), such as ``ILSVRC2012_val_00000293.JPEG``; or a mapping from the names of pictures to such lists.
        pictures: paths.

    Raises:
        DataError: if the file is no such file, or does not have a picture.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}; correct 'real_labels'") from None
    labels = content if isinstance(content, Mapping) else _by_number(content)
    wrong = next((key for key, value in labels.items() if not _is_set(value)), None)
    if wrong is not None or not labels:
        what = f"an entry {wrong!r} that is no list of class indices" if labels else "no entries"
        raise DataError(f"{file} has {what}; labels are a list of lists, as of ImageNet-ReaL, or a mapping to lists")
    sets = []
    for picture in pictures:
        name = Path(picture).name
        key: str | int = name if isinstance(content, Mapping) else _number(name)
        if key not in labels:
            raise DataError(f"{file} has no labels of {picture}; correct 'real_labels', or remove it")
        sets.append(frozenset(labels[key]))
    return sets


def _by_number(content: Any) -> dict[str | int, Any]:
    return dict(enumerate(content, 1)) if isinstance(content, list) else {}


def _number(name: str) -> int:
    """Return the number at the end of a file's name, without its suffix; 0 if there is none."""
    match = re.search(r"(\d+)$", Path(name).stem)
    return int(match[1]) if match else 0


def _is_set(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
