"""User and git commit of a study, which MLflow's client determines only in its fluent API."""

from __future__ import annotations

import getpass
import subprocess
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit


def source_tags(study_file: Path, folder: Path) -> dict[str, str]:
    """Return MLflow's tags for the user, the study file and the git repository of ``folder``, if any."""
    tags = {"mlflow.source.name": str(study_file), "mlflow.source.type": "LOCAL"}
    with suppress(OSError, KeyError):  # a container may run under an id that has no name
        tags["mlflow.user"] = getpass.getuser()
    commit = _git(folder, "rev-parse", "HEAD")
    if commit:
        tags["mlflow.source.git.commit"] = commit
        tags["mlflow.source.git.dirty"] = str(bool(_git(folder, "status", "--porcelain", "--untracked-files=no")))
        branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
        remote = _git(folder, "config", "--get", "remote.origin.url")
        tags |= {"mlflow.source.git.branch": branch} if branch else {}
        tags |= {"mlflow.source.git.repoURL": _public(remote)} if remote else {}
    return tags


def commit_of(folder: Path) -> str:
    """Return the git commit of a folder, marked if files differ from it; empty outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    changed = commit and _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with uncommitted changes" if changed else commit


def _public(remote: str) -> str:
    """Return the address without user and password, which may be a token."""
    parts = urlsplit(remote)
    if not parts.scheme:
        return remote
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _git(folder: Path, *arguments: str) -> str:
    try:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
