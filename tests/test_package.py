"""Tests of the package itself: cost of imports, and public names."""

import ast
import functools
import importlib
import itertools
import json
import pkgutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vitlab
from vitlab import registry
from vitlab.cli import COMMANDS
from vitlab.registry.slot_modules import built_ins

ROOT = Path(__file__).parents[1]
parse = functools.cache(ast.parse)  # several tests read all files
HEAVY = ("torch", "torchvision", "mlflow", "pandas", "pyarrow", "ray", "matplotlib", "scipy", "sklearn")


def heavy_after(*steps: str) -> dict[str, list[str]]:
    """Return the heavy modules of a fresh process after each of several pieces of code, run one after the other.

    What is imported stays, so a process for all of them finds what one for each would; the first that has any is to
    blame.
    """
    script = "import json, sys\ntold = {}\n" + "".join(
        f"exec({step!r})\ntold[{step!r}] = [m for m in {HEAVY!r} if m in sys.modules]\n" for step in steps
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{script}print(json.dumps(told))"], capture_output=True, text=True, check=True
    )
    modules: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return modules


def called(*arguments: str) -> str:
    return f"from vitlab.cli import cli; cli.main({list(arguments)!r}, standalone_mode=False)"


def test_importing_vitlab_lists_and_help_import_nothing_heavy() -> None:
    statements = ["import vitlab", "import vitlab.cli", "import vitlab.spec, vitlab.registry, vitlab.store.folders"]
    outputs = [called(*words) for words in (["--help"], ["list"], ["list", "position"], ["list", "--json"])]
    helped = [called(command, "--help") for command in COMMANDS]
    modules = heavy_after(*statements, *outputs, *helped)
    assert len(modules) == 3 + 4 + len(COMMANDS) and not any(modules.values()), modules


def test_planning_imports_only_torch() -> None:
    """The code digest of a trial needs no further import."""
    study = ROOT / "pipelines" / "quickstart.yaml"
    unused = {"vitlab.engines.vmap", "vitlab.training.artifacts", "vitlab.models.cost", "torch._dynamo"}
    unused |= {
        "vitlab.models.convnet",
        "vitlab.executors.ray",
        "vitlab.training.optim.muon",
        "vitlab.data.datasets.idx",
    }
    convnet = (
        "from vitlab.geometry import DataInfo\n"
        "from vitlab.models import model\n"
        "choice = model.resolve_choice({'type': 'resnet18', 'stem': 'small'})\n"
        "choice.component.incompatibility(DataInfo(image=(8, 8), channels=1, classes=2), choice.options)"
    )
    code = f"{called('validate', str(study))}\nimport sys; assert not {unused!r} & sys.modules.keys()\n{convnet}"
    assert heavy_after(code) == {code: ["torch"]}


def test_public_names() -> None:
    functions = {
        "compare",
        "explain",
        "history",
        "judge",
        "list_components",
        "load",
        "plan",
        "predictions",
        "results",
        "run",
    }
    assert set(vitlab.__all__) == functions | {"SpecError", "UserError", "VitlabError", "__version__"}
    assert sorted(vitlab.__all__) == dir(vitlab)
    for name in vitlab.__all__:
        assert getattr(vitlab, name) is not None
    for name, words in (
        ("nothing", "no attribute 'nothing'[.]$"),
        ("runn", "'runn'[.] Did you mean 'run'[?]$"),
        ("validate", "mean 'plan'"),
    ):
        with pytest.raises(AttributeError, match=words):
            getattr(vitlab, name)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "sentences"),
    [
        ("list_components", (3,), {}, ["slot must be a text; found 3"]),
        ("list_components", (True,), {}, ["slot must be a text; found true"]),
        ("list_components", ("position", 4), {}, ["2 arguments have no name; allowed without one: slot"]),
        ("results", ("a",), {"path": "b"}, ["'path' is given twice"]),
        (
            "judge",
            ("a.csv",),
            {"metric": 5, "alpha": "x", "chnce": 3},
            ["metric must be a text; found 5", "alpha must be a number; found 'x'", "Did you mean 'chance'?"],
        ),
        ("list_components", ("postion",), {}, ["no slot called 'postion'. Did you mean 'position'?"]),
        ("compare", ([],), {}, ["first must be a text or a path or a mapping; found an empty list"]),
        ("load", ("a",), {"arms": "b", "seed": []}, ["seed must be a whole number", "Did you mean 'arm'?"]),
        ("history", (), {"paths": "a"}, ["no option 'paths'. Did you mean 'path'?"]),
        ("predictions", ("a",), {"out": 3}, ["out must be a text or a path; found 3"]),
        ("results", (3,), {}, ["path must be a text or a path or a mapping; found 3"]),
        ("plan", (3,), {}, ["file must be a text or a path or a mapping; found 3"]),
        ("run", ("a",), {"seeds": 3}, ["no argument 'seeds'; a value of the study is written changes={'seeds': 3}."]),
        ("run", ("a",), {"steps": 3}, ["'steps'; a value of the study is written changes={'steps': 3}."]),
        ("run", ("a",), {"seed": 3}, ["changes={'seed': 3}. Write seeds: 5 at the top level"]),
        ("run", ("a",), {"plugins": "a.py", "watch": 3}, ["plugins must be a list; found 'a.py'", "instance of Watch"]),
    ],
)
def test_wrong_argument_of_public_function_is_a_sentence(
    function: str, arguments: tuple[object, ...], options: dict[str, object], sentences: list[str]
) -> None:
    with pytest.raises(vitlab.UserError) as error:
        getattr(vitlab, function)(*arguments, **options)
    assert len(error.value.args) == len(sentences), error.value
    assert all(sentence in str(error.value) for sentence in sentences), error.value
    assert all(f"vitlab.{function}" in sentence for sentence in error.value.args if "no slot" not in sentence)
    assert "YAML" not in str(error.value)


class Elsewhere:
    """A path of another library."""

    def __fspath__(self) -> str:
        return "nothing"


@pytest.mark.parametrize("path", ["nothing", b"nothing", Path("nothing"), PurePosixPath("nothing"), Elsewhere()])
def test_every_path_names_a_study(path: Any, tmp_path: Path) -> None:
    messages = []
    for arguments, options in (((path,), {}), ((), {"path": path})):
        with pytest.raises(vitlab.UserError) as error:
            vitlab.results(*arguments, **options, out=tmp_path)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "nothing" in messages[0] and "must be" not in messages[0]


@pytest.mark.parametrize("slot", registry.SLOT_MODULES)
def test_built_ins_are_what_importing_every_module_registers(slot: str) -> None:
    """They are found in the text of the modules, none of which is imported for that."""
    package = registry.import_slot(slot)
    for module in pkgutil.iter_modules(getattr(package, "__path__", []), f"{package.__name__}."):
        importlib.import_module(module.name)
    registered = {
        name: (cls.__module__, cls.__qualname__, (cls.__doc__ or "").partition("\n")[0])
        for (source, name), (cls, _) in registry.slot(slot).components.items()
        if source == registry.BUILT_IN
    }
    assert registered == dict(built_ins(slot)) and registered
    assert {entry.name for entry in registry.list_entries(slot)} == set(registry.slot(slot).names()) >= set(registered)


def test_components_have_docstring_and_no_required_option() -> None:
    for slot in registry.SLOT_MODULES:
        for entry in registry.list_entries(slot):
            if entry.origin.source.endswith(".py"):
                continue  # a file that another test of this process has loaded
            room = registry.slot(slot)
            component = room.get(entry.name)
            assert (component.__doc__ or "").strip(), f"{slot} {entry.name} has no docstring"
            required = [name for name, field in room.options(component).model_fields.items() if field.is_required()]
            assert not required or slot == "dataset", f"{slot} {entry.name} has no default for {required}"


PARTS = {"pydantic_core": "pydantic"}
"""What a library has its users import from, and alone brings along in the one version that it works with."""


def test_imports_are_declared_dependencies() -> None:
    """A transitive dependency may disappear with its parent."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    names = {canonicalize_name(Requirement(text).name) for text in declared}
    offers = packages_distributions()
    for file in (ROOT / "vitlab").rglob("*.py"):
        for node in ast.walk(parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for module in {PARTS.get(name, name) for name in (full.partition(".")[0] for full in modules)}:
                if module not in sys.stdlib_module_names | {"vitlab"}:
                    distributions = {canonicalize_name(name) for name in offers.get(module, [module])}
                    assert distributions & names, f"{file} imports {module}, which pyproject.toml does not name"


def test_every_module_is_in_the_core_or_a_wing() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (item for item in contracts if item["name"] == "The core imports no wing")
    patterns = [*contract["source_modules"], *contract["forbidden_modules"]]
    modules = ["vitlab", *(module.name for module in pkgutil.walk_packages(vitlab.__path__, "vitlab."))]
    lists = {name: [pattern for pattern in patterns if fnmatch(name, pattern)] for name in modules}
    assert {name: found for name, found in lists.items() if len(found) != 1} == {}


def test_public_method_has_docstring_or_implements_documented_one() -> None:
    documented, bare = {"forward"}, {}
    for file in (ROOT / "vitlab").rglob("*.py"):
        for cls in (node for node in ast.walk(parse(file.read_text())) if isinstance(node, ast.ClassDef)):
            for method in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
                if ast.get_docstring(method):
                    documented.add(method.name)
                elif not (method.name.startswith("_") or cls.name.startswith("_")):
                    bare[f"{file}: {cls.name}.{method.name}"] = method.name
    assert [place for place, name in bare.items() if name not in documented] == []


RUNS = {"eval", "exec", "os.system", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "pickle.load", "pickle.loads"}
"""What runs a text, or what a file says is to be run."""
ONLY_WITH = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
ITS_OWN = {"vitlab/registry/file_loader.py": ["exec", "compile"]}
"""Where a file of --plugin is run, which a user has named."""


def risks(source: str) -> list[str]:
    """Return the calls of a source that execute data."""
    calls = []
    for call in (node for node in ast.walk(parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        keywords = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
        option, value = ONLY_WITH.get(name, ("", None))
        if name in RUNS or keywords.get("shell") is True or keywords.get(option) is not value:
            calls.append(name)
    return calls


def test_no_file_is_read_by_unsafe_loader() -> None:
    for file in (path for room in ("vitlab", "plugins", "docs") for path in (ROOT / room).rglob("*.py")):
        if "tests" not in file.parts:
            place = str(file.relative_to(ROOT))
            assert [risk for risk in risks(file.read_text()) if risk not in ITS_OWN.get(place, ())] == [], place


@pytest.mark.parametrize(
    "source",
    [
        *("eval(text)", "exec(text)", "os.system(text)", "yaml.load(text, yaml.Loader)", "pickle.load(file)"),
        *(
            "torch.load(file)",
            "torch.load(file, weights_only=False)",
            "np.load(file)",
            "np.load(file, allow_pickle=True)",
        ),
        "subprocess.run(text, shell=True)",
    ],
)
def test_unsafe_loader_is_detected(source: str) -> None:
    assert len(risks(f"def f(file, text):\n    return {source}")) == 1


def test_top_level_names() -> None:
    assert {"pyproject.toml", "vitlab", "plugins", "pipelines", "tests", "docker"} <= {p.name for p in ROOT.iterdir()}


@pytest.mark.filterwarnings("ignore")  # imports of MLflow emit warnings
def test_container_server_answers_to_its_service_name() -> None:
    from mlflow.server.security_utils import is_allowed_host_header

    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    called = services["lab"]["environment"]["MLFLOW_TRACKING_URI"].partition("http://")[2].removesuffix("}")
    start = [*services["mlflow"]["entrypoint"], *services["mlflow"]["command"]]
    hosts = start[start.index("--allowed-hosts") + 1]  # or additional hosts from the environment
    allowed = hosts.partition(":-")[2].removesuffix("}").split(",")
    assert all(is_allowed_host_header(allowed, host) for host in (called, "127.0.0.1:5000", "localhost:5000"))
    assert not is_allowed_host_header(allowed, "elsewhere.example:5000")
