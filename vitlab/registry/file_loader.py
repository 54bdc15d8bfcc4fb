"""The loader of single Python files of components.

A file is run again if its code has changed; the components of a file that fails are unregistered.
"""

import ast
import hashlib
import sys
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from vitlab import imports
from vitlab.errors import BrokenComponent, ClashError, UserError
from vitlab.registry import plugins
from vitlab.registry.plugins import PluginFile, sentence_with_place
from vitlab.registry.slot_modules import Origin
from vitlab.registry.slots import remove_origin

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)  #: nodes that may have a docstring


def load_file(file: Path | str) -> Origin:
    """Run a Python file that registers components in this process.

    A file whose code has not changed is run once.  An edited file is run again, and its components replace those it
    registered before.  A file that fails registers nothing.

    Raises:
        UserError: if there is no Python file of that name.
        BrokenComponent: if the file fails; the message ends with the lines that were running.
        ClashError: if it registers a component that another file of the same name has registered.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(
            f"plugin file {file}: this is not a file; write the path of a Python file, such as "
            "my_blocks.py; an installed package needs none: 'vitlab plugins' lists these"
        )
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"plugin file {file}: {error.strerror}") from None
    origin = Origin(path.name, _code_digest(text))
    # The digest is of the code, so a file in which only comments or docstrings changed is not run again.
    name = plugins.file_module_name(origin)
    if name in plugins.files:  # by another path, too: the module of both would have one name
        return origin
    if path.suffix != ".py":
        raise UserError(f"plugin file {file}: rename it so that it ends in .py")
    for outdated in [each for each, earlier in plugins.files.items() if earlier.path == path]:
        remove_origin(plugins.files.pop(outdated).origin)
    plugins.files[name] = PluginFile(path, origin, text)
    spec = spec_from_file_location(name, path)
    assert spec is not None  # of a path that ends in .py
    module = module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up there
    imports.record_module_import(name, path)
    try:
        # The digested text runs, not a newer file or older code in __pycache__.
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        message = sentence_with_place(error)
        del sys.modules[name]
        remove_origin(origin)
        del plugins.files[name]
        if isinstance(error, KeyboardInterrupt | BrokenComponent | ClashError):
            raise
        raise BrokenComponent(f"plugin file {file} failed: {message}") from error
    return origin


def _code_digest(text: bytes) -> str:
    """Return the digest of the syntax tree without docstrings and comments, or of the text if it does not parse."""
    with suppress(SyntaxError, ValueError):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        text = ast.dump(tree).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()
