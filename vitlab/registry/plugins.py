"""Plugins: installed distributions that offer components, and single files of components that this process has run.

Distributions are read from their metadata, without importing them; one is imported when a study names a component of
it.  Their components are entry points in the groups ``vitlab.<slot>``; their requirements are those of their metadata.
A failure is attributed to a plugin by the code of plugins in its traceback.
"""

import inspect
import re
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path

from packaging.utils import canonicalize_name

from vitlab._version import __version__
from vitlab.errors import VitlabError, nearest, one_line
from vitlab.imports import INSTALLED
from vitlab.registry.slot_modules import BUILT_IN, Origin
from vitlab.store.files import display_path

UNKNOWN = "unknown"
NO_CHANGE = "leave arguments as they are: write x = x + y in place of x += y, and change copies, such as x.clone()"


@dataclass(frozen=True)
class PluginFile:
    """A file of components as it was when it was run."""

    path: Path
    origin: Origin
    text: bytes


files: dict[str, PluginFile] = {}
"""Module to file, of all files that this process has run, as they were run last."""


def file_module_name(origin: Origin) -> str:
    """Return the module name under which a file of components is run."""
    return f"vitlab_file_{Path(origin.source).stem}_{origin.version}"


def slot_points(slot: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a slot."""
    return _read_entry_points().get(f"{BUILT_IN}.{slot}", ())


def dist_name(point: EntryPoint) -> str:
    """Return the name of the distribution of an entry point."""
    return _metadata_or_unknown(point.dist, "Name")


def dist_origin(point: EntryPoint) -> Origin:
    """Return the name and the version of the distribution of an entry point."""
    return Origin(dist_name(point), _metadata_or_unknown(point.dist, "Version"))


@cache
def _metadata_or_unknown(dist: Distribution | None, key: str) -> str:
    try:
        return (dist and dist.metadata[key]) or UNKNOWN
    except Exception:  # an interrupted installation leaves missing or unreadable metadata
        return UNKNOWN


def why_requirement_unmet(text: str) -> str | None:
    """Return why a requirement such as ``acme-vit>=0.3,<1`` is not met here, or None if it is."""
    from packaging.requirements import InvalidRequirement, Requirement  # slow to import, and rarely needed

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        requirement = None
    if requirement is None or requirement.url or requirement.extras or requirement.marker:
        return f"'{text}' is not a requirement: write a name, or a name and its versions, such as acme-vit>=0.3,<1"
    quoted = f"'{text}'" if requirement.specifier else text
    try:
        dist = distribution(requirement.name)
    except PackageNotFoundError:
        own = "pip install -e FOLDER if it is your own"
        return f"this study needs {text}, which is not installed: pip install {quoted}, or {own}"
    if not requirement.specifier.contains(dist.version, prereleases=True):
        return f"this study needs {text}, and {dist.version} is installed: pip install {quoted}"
    return why_unusable(dist)


def why_unusable(dist: Distribution | None) -> str | None:
    """Return why a distribution cannot be used with this vitlab, or None if it can."""
    if dist is None:
        return None
    from packaging.requirements import InvalidRequirement, Requirement

    for text in dist.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # a malformed requirement is the package manager's concern
        # pip checks requirements when it installs; vitlab may have been upgraded since.
        is_ours = canonicalize_name(requirement.name) == BUILT_IN
        is_ours &= requirement.marker is None or requirement.marker.evaluate({"extra": ""})  # not of an extra
        if is_ours and not requirement.specifier.contains(__version__, prereleases=True):
            need = text.partition(";")[0].strip()
            return f"{dist.name} {dist.version} needs {need}, and this is {__version__}: upgrade one of the two"
    return None


@cache
def _read_entry_points() -> dict[str, tuple[EntryPoint, ...]]:
    """Return entry points by group, read from disk once, without vitlab's own."""
    every = entry_points()  # reads the metadata of every distribution of the environment
    return {
        group: tuple(point for point in every.select(group=group) if dist_name(point) != BUILT_IN)
        for group in every.groups
        if group.startswith(f"{BUILT_IN}.")
    }


# -- the code of plugins in tracebacks --------------------------------------------------------------------------------


def find_plugin_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost plugin code in the traceback of an exception; None if vitlab and libraries alone are in it.

    It is that of the exception itself, or of the first one in its chain that has any.
    """
    visited: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in visited:  # an exception can be its own context, indirectly
        visited.append(link)
        frames = [
            traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in traceback.walk_tb(link.__traceback__)
            if _is_plugin_code(str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename)
        ]
        # The frames of a syntax error are those of the importer; the file with the error is named beside them.
        if isinstance(link, SyntaxError) and link.filename and _is_plugin_code("", link.filename):
            frames.append(traceback.FrameSummary(link.filename, link.lineno or 1, "<module>"))
        if frames:
            return frames[-1]
        link = link.__cause__ or link.__context__
    return None


def sentence_with_place(error: BaseException) -> str:
    """Return an exception on one line: vitlab's own unchanged, others with their type and the line of the plugin.

    What to do about it follows, if that is known.
    """
    text = one_line(error)
    if isinstance(error, VitlabError):
        return text
    advice = _advice_on_error_message(text)
    # Torch's own advice is a call that no study can make.
    text = re.sub("(does not have a deterministic implementation), but you set.*", r"\1", text)
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    source = find_plugin_frame(error)
    return (text if source is None else f"{text}, at {format_frame(source)}") + advice


def _advice_on_error_message(text: str) -> str:
    """Return what to do about the message of an exception, if that is known."""
    if match := re.match(r"(?:cannot import name '(.*)' from|No module named) '?vitlab\b", text):
        hint = nearest(match[1] or "", getattr(sys.modules.get("vitlab.plugin"), "__all__", ()))
        return (
            f"; this is vitlab {__version__}, which has no such name.{hint} Import from vitlab.plugin, whose names "
            "stay, or pin the vitlab that has it in the plugin's dependencies"
        )
    if "before Module.__init__() call" in text or "has no attribute '_modules'" in text:
        return "; begin the constructor with super().__init__()"
    if re.search("(?i)expected device|same device", text):
        return "; create a tensor on the input's device, as in x.new_zeros(...), or register it as a buffer"
    if re.search(r"(?i)\bmeta\b", text):
        return (
            "; models are planned without values, by meta tensors: use torch operations, such as torch.where, in place "
            "of .item(), float(), numpy and if, or set vmap_safe = False and return empty_like(x) if x.is_meta"
        )
    if "leaf Variable that requires grad is being used in an in-place" in text:
        return f"; {NO_CHANGE}"
    if "object is not callable" in text:
        return "; an attribute, such as an option, may have the name of a method of the class: rename it"
    if "operator torchvision::nms does not exist" in text:
        return "; call torchvision() of vitlab.plugin before this import, which works with every build of torch"
    if "does not have a deterministic implementation" in text:
        return "; run.deterministic: false allows it, and runs then differ"
    return ""


def _is_plugin_code(module: str, file: str) -> bool:
    """Return whether code belongs to a plugin, given the name and file of its module."""
    path, package = Path(file), module.partition(".")[0]
    loaded = [plugin.path for plugin in files.values()]
    points = [point for points in _read_entry_points().values() for point in points]
    if path in loaded or package in {point.module.partition(".")[0] for point in points}:
        return True
    is_beside = any(path.is_relative_to(each.parent) for each in loaded)
    return is_beside and package != BUILT_IN and INSTALLED.isdisjoint(path.parts)


def place_of_class(cls: type) -> str:
    """Return ``my_blocks.py:12``, where a class is defined, or its module if the source is not known."""
    try:
        file, (_, line) = inspect.getsourcefile(cls), inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return getattr(cls, "__module__", UNKNOWN)  # an entry point may name any object
    return format_frame(traceback.FrameSummary(str(file), line, ""))


def format_frame(frame: traceback.FrameSummary) -> str:
    """Return ``my_blocks.py:13``, relative to the working directory if the file is below it."""
    return f"{display_path(Path(frame.filename))}:{frame.lineno or 0}"
