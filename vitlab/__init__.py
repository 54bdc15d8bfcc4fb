"""vitlab: a laboratory for Vision Transformer ablations.

A study is named by its file, by its name, or given as a mapping::

    import vitlab

    vitlab.plan("quickstart")               # one row per trial, before anything is trained
    answer = vitlab.run("quickstart")       # train what is missing, and report
    answer.answers                          # sentences, one per comparison
    answer.report                           # the path of the report
    print(vitlab.compare("quickstart"))     # answers, one row per arm; also .notes, .figures and .render("md")
    vitlab.results("quickstart")            # one row per trial
    vitlab.history("quickstart")            # the curves
    vitlab.predictions("quickstart")        # one row per test image and trial
    model, transform = vitlab.load("quickstart", arm="baseline", seed=0)
    vitlab.explain("quickstart", 3, arm="baseline")  # what a model attends to in test image 3
    vitlab.judge("results.csv", metric="acc", arm="model", seed="seed")  # results that something else has trained
    vitlab.list_components("position")      # the names that a study can use, as 'vitlab list' prints them

A mistake raises :class:`vitlab.UserError`, or :class:`vitlab.SpecError` with every mistake of a study.  Components are
written with the names in :mod:`vitlab.plugin`.

Names are imported on first use, so that ``import vitlab`` costs nothing.
"""

from vitlab import interrupts

if interrupts.is_command():
    interrupts.install()  # before all other imports, which take a while

from typing import TYPE_CHECKING, Any

from vitlab import imports
from vitlab._version import __version__ as __version__

imports.record_imports()

if TYPE_CHECKING:
    from vitlab.driver.explanations import explain
    from vitlab.driver.planning import plan
    from vitlab.errors import SpecError, UserError, VitlabError
    from vitlab.judging.judgement import judge
    from vitlab.lab import run
    from vitlab.report.api import compare, history, list_components, load, predictions, results

__all__ = [
    "SpecError",
    "UserError",
    "VitlabError",
    "__version__",
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
]


if not TYPE_CHECKING:  # for type checkers, a name that is not imported above is a mistake

    def __getattr__(name: str) -> Any:
        return imports.import_lazy_name(__name__, name)


def __dir__() -> list[str]:
    return __all__
