"""Tests of the progress of a run in a notebook and as plain lines."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import synthetic_studies

from vitlab.driver import progress


class Display:
    """Replacement of ``IPython.display.display`` in a kernel, with all updates."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def display(self, item: Any, *, display_id: bool) -> Display:
        assert display_id
        self.update(item)
        return self

    def update(self, item: Any) -> None:
        self.shown.append(item._repr_mimebundle_([], []))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Display:
    display = Display()
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, display=types.SimpleNamespace(display=display.display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    return display


def test_only_a_kernel_is_a_notebook(notebook: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(progress.make_watch(), progress.NotebookView)
    for shell in (None, object()):  # imported by a script; IPython in a terminal
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda shell=shell: shell)
        assert isinstance(progress.make_watch(), progress.PlainLines)
    monkeypatch.delitem(sys.modules, "IPython")
    assert isinstance(progress.make_watch(), progress.PlainLines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for term, view in (("dumb", progress.PlainLines), ("xterm", progress.LiveView)):  # dumb: nothing can be redrawn
        monkeypatch.setenv("TERM", term)
        assert type(progress.make_watch()) is view


def test_notebook_has_one_updated_output(
    notebook: Display, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 2, "<b>": [None] * 2})
    view = progress.make_watch()
    view.on_plan(plan, plan.trials, store)
    for planned in plan.trials[:2]:
        view.on_start(planned)
    folder = store.trial(plan.trials[1].trial.key, plan.trials[1].trial.code)
    folder.path.mkdir(parents=True)
    folder.emit("metrics", step=50, epoch=2.5, images=1, metrics={"val/accuracy": 0.25})
    view.on_start(plan.trials[2])
    view.on_end(plan.trials[0], "done", "")
    view.on_end(plan.trials[2], "failed", "out of <memory>\nat line 3")
    monkeypatch.setattr(view, "refresh_s", -1.0)
    view.tick()
    view.close()
    first, *_, running, last = notebook.shown
    assert "0 of 4 trials" in first["text/plain"] and "2 of 4 trials" in running["text/plain"]
    html = running["text/html"]
    assert (
        "baseline s1" in html
        and "25.0" in html
        and "val accuracy (%)" in html
        and "baseline s0" not in html
        and "━" in html
    )
    assert "baseline s1" not in last["text/html"] and "2 of 4 trials" in last["text/plain"]
    head, failure = capsys.readouterr().out.splitlines()
    assert head == "positions: 2 arms, 4 trials; 4 to train" and failure == "<b> s0 failed: out of <memory>"


def test_notebook_escapes_names(notebook: Display, tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None], "<b>": [None]})
    view = progress.NotebookView()
    view.on_plan(plan, plan.trials, store)
    view.on_start(plan.trials[1])
    html = view._render_table()._repr_mimebundle_([], [])["text/html"]
    assert "&lt;b&gt; s0" in html and "<b>" not in html
