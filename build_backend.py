"""The build backend: setuptools, whose wheels and source distributions have the same bytes in every build.

Times are ``SOURCE_DATE_EPOCH``, or the earliest that a wheel can hold; owners and modes are not those of the builder.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # 1980-01-01
os.umask(0o022)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build a source distribution and write it again with fixed times, owners and modes."""
    name = build_meta.build_sdist(sdist_directory, config_settings)
    file = Path(sdist_directory, name)
    time = int(os.environ["SOURCE_DATE_EPOCH"])
    data = io.BytesIO()
    with tarfile.open(file) as source, tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in sorted(source.getmembers(), key=lambda item: item.name):
            member.mtime, member.pax_headers = time, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    file.write_bytes(gzip.compress(data.getvalue(), mtime=time))
    return name
