"""Tests of comparisons of two studies: the command, the frame, and refusals."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_studies
from click.testing import CliRunner
from scipy import stats

import vitlab
from vitlab.cli import cli
from vitlab.errors import UserError
from vitlab.planning.values import Plan, Planned
from vitlab.report import frame
from vitlab.report.api import open_study
from vitlab.report.comparison import COLUMNS
from vitlab.report.notebook import NamedFrame
from vitlab.report.phrasing import MINUS
from vitlab.report.two_studies import compare_studies
from vitlab.spec import Choice
from vitlab.store.files import write_json
from vitlab.store.folders import Store
from vitlab.store.result import Circumstances, Outcome, TrialResult

OLD = {"baseline": synthetic_studies.BASE, "<b>=1": synthetic_studies.SINE, "gone": synthetic_studies.NEAR}
NEW = {"baseline": synthetic_studies.NEAR, "<b>=1": synthetic_studies.NONE, "fresh": synthetic_studies.NEAR}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output folder with the studies ``old`` and ``new``, with trials of different code and dropout."""
    root = tmp_path_factory.mktemp("out")
    for name, arms in (("old", OLD), ("new", NEW)):
        plan, _ = synthetic_studies.study(root / "scratch" / name, arms)
        trials = []
        for item in plan.trials:
            model = Choice("vit", {"drop": 0.1 if name == "new" else 0.0})
            spec = item.trial.spec.model_copy(update={"model": model})
            key = f"{name}-{len(trials)}"
            trial = dataclasses.replace(item.trial, spec=spec, key=key, code=f"{name}-code")
            trials.append(Planned(item.arm, item.seed, trial))
            around = Circumstances(1.7e9, 1.0, "host", 1, 100, 1000, 10**8, {}, {})
            outcome = Outcome({"val/accuracy": arms[item.arm][item.seed]}, (), "w", 10, 640)
            Store(root).trial(trial.key, trial.code).write_result(
                TrialResult(key, trial.code, "done", outcome, around, "")
            )
        plan = dataclasses.replace(plan, study=name, trials=tuple(trials))
        write_json(Store(root).study(name) / "plan.json", plan.to_json())
    return root


def change(out: Path, name: str, **values: object) -> None:
    """Write a further study that equals ``new`` except for some values."""
    plan = Plan.from_json(json.loads((out / "studies" / "new" / "plan.json").read_text()))
    write_json(out / "studies" / name / "plan.json", dataclasses.replace(plan, study=name, **values).to_json())


def test_arms_of_equal_name_are_compared_at_equal_seeds_as_one_family(out: Path) -> None:
    table = vitlab.compare("old", "new", out=out)
    rows = table.set_index("arm")
    assert list(rows.index) == ["old: baseline", "old: <b>=1", "new: baseline", "new: <b>=1"]
    pairs = [stats.ttest_rel(NEW[arm], OLD[arm]) for arm in ("baseline", "<b>=1")]
    assert rows["p"].tolist()[2:] == pytest.approx([pair.pvalue for pair in pairs])
    corrected = np.minimum(1, [2 * pair.pvalue for pair in pairs])
    assert rows["p_corrected"].tolist()[2:] == pytest.approx(corrected.tolist())
    interval = pairs[1].confidence_interval(1 - 0.05 / 2)
    ends = rows.loc["new: <b>=1", ["difference_low", "difference_high"]].tolist()
    assert ends == pytest.approx([interval.low, interval.high])
    assert any("model.drop 0.0 -> 0.1; code old-code -> new-code" in note for note in table.notes)
    assert "In old alone, and not compared: gone." in table.notes
    assert "In new alone, and not compared: fresh." in table.notes
    assert table.answers[1].startswith("exploratory: new: <b>=1 is 2.4 points below old: <b>=1")
    assert rows["exploratory"].tolist()[2:] == ["neither study registered this comparison"] * 2
    assert rows["exploratory"].isna().tolist()[:2] == [True, True]


def test_columns_do_not_depend_on_comparison(out: Path) -> None:
    one, two = vitlab.compare("old", out=out), vitlab.compare("old", "new", out=out)
    of_test = dict.fromkeys(("test/accuracy", "test/accuracy_sd"), "float64")  # not measured in either
    assert tuple(one.columns) == tuple(two.columns) == (*COLUMNS, *of_test)
    promised = {**{name: kind for name, (kind, _) in COLUMNS.items()}, **of_test}
    assert {name: str(kind) for name, kind in one.dtypes.items()} == promised
    assert one.dtypes.equals(two.dtypes)
    assert one["arm"].tolist() == list(OLD)


def test_notebook_shows_answers_and_escapes_names(out: Path) -> None:
    tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)

    html = vitlab.compare("old", "new", out=out)._repr_html_()
    Reader().feed(html)
    assert set(tags) == {"div", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "p"}
    assert "&lt;b&gt;=1 is 2.4 points below" in html


@pytest.mark.slow
def test_text_begins_with_answers_and_has_few_columns(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is selected of the frame, and what was changed in place, is shown as numbers."""
    monkeypatch.setenv("COLUMNS", "80")
    table = vitlab.compare("old", "new", out=out)
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 80 and " ".join(lines).startswith(" ".join(table.answers))
    (row,) = [line for line in lines if line.startswith(" new: <b>=1")]
    mean, sd = 100 * np.mean(NEW["<b>=1"]), 100 * np.std(NEW["<b>=1"], ddof=1)
    assert f"{mean:.1f} ± {sd:.1f}" in row and f" {MINUS}2.4 [" in row and row.endswith("worse (exploratory)")
    assert repr(pickle.loads(pickle.dumps(table))) == repr(table)
    worse = table[table["verdict"] == "worse"]
    monkeypatch.setenv("COLUMNS", "200")
    names, numbers, columns = str(worse).split("\n")
    assert names.split() == [*("arm", "mean", "sd", "verdict"), *("difference", "difference_low", "difference_high")]
    assert (
        "new: <b>=1" in numbers
        and columns == f"arms of old and new; columns: {', '.join(table)}"
        and "<td>" in worse._repr_html_()
    )
    for kept in (table.copy(), worse):
        assert kept.answers == table.answers and kept.render() == table.render()
    joined = pd.concat([table, table])
    assert not hasattr(joined, "answers") and len(joined) == 2 * len(table) and "new: <b>=1" in str(joined)
    chosen = table[["arm", "n"]]
    assert repr(chosen) == repr(pd.DataFrame(chosen))
    table["mine"] = 1
    assert str(table).splitlines()[0].endswith("mine") and "mine" in table._repr_html_()
    monkeypatch.setenv("COLUMNS", "80")
    results = vitlab.results("old", out=out)
    assert re.match(r" +arm +seed +status +wall_s +val/accuracy\n", str(results)), "and no test metric"
    assert str(results).splitlines()[-1] == f"results of old; columns: {', '.join(results)}"
    head = str(results.head()).partition("\n")[0]
    assert all(name in head for name in ("arm", "seed", "status", "val/accuracy")) and "origins" not in head
    assert repr(pickle.loads(pickle.dumps(results))) == repr(results)
    reasons = results.assign(arm="broken " * 30 + "at last")
    monkeypatch.setenv("COLUMNS", "2")
    assert "at last" not in str(reasons), "no width of a terminal raises"
    assert "at last" in str(reasons[["arm", "seed"]]), "of selected columns, texts are whole"
    monkeypatch.setenv("COLUMNS", "80")
    hidden = results[["arm", *results.others]]
    assert "of old; columns:" not in str(hidden) and "images" in str(hidden), "also all that are hidden elsewhere"
    chosen = results[["arm", "seed", "status", "origins"]]
    assert repr(chosen) == repr(pd.DataFrame(chosen)) and "mine" in str(results.assign(mine=1)).splitlines()[0]
    for shown in (str(results.query("seed > 2")), results.query("seed > 2")._repr_html_()):
        assert "columns: arm, seed, status, study" in shown and shown.count("origins") == 1


def test_text_of_selected_columns_has_whole_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = "RuntimeError: shapes (3, 4) and (5, 6) do not fit, at acme.py:17"
    table = pd.DataFrame({"arm": ["position=sinusoidal, depth=2"], "seed": [0], "status": ["failed"], "code": ["1"]})
    results = NamedFrame.from_table(table.assign(failure=failure), "failures", ["arm", "seed", "status"])
    chosen = results[["arm", "seed", "status", "failure"]]
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert failure in str(chosen) and max(map(len, str(chosen).splitlines())) <= width
        assert "..." not in str(results)
    assert failure in chosen._repr_html_()


def test_notebook_shows_notes_of_report(out: Path) -> None:
    table = vitlab.compare("old", out=out)
    assert any("5 seeds (0 to 4) vary" in note for note in table.notes)
    assert "5 seeds (0 to 4) vary" in table._repr_html_()


def test_results_have_documented_columns(out: Path) -> None:
    table = vitlab.results("old", out=out)
    names = list(table.columns)
    assert names[: len(frame.BEFORE)] == list(frame.BEFORE) and names[-1] == "val/accuracy"
    for name, (kind, _) in (frame.BEFORE | frame.AFTER).items():
        assert str(table[name].dtype) == kind, name
    assert table.isna().sum()["failure_kind"] == 15


def test_command_prints_every_format(out: Path) -> None:
    def output_of(form: str) -> str:
        result = CliRunner().invoke(cli, ["compare", "old", "new", "--out", str(out), "--format", form])
        assert result.exit_code == 0, result.output
        return result.output

    assert "new: <b>=1 is 2.4 points below" in " ".join(output_of("terminal").split())
    assert "it is exploratory" in output_of("md") and r"\toprule" in output_of("latex")
    assert json.loads(output_of("json"))["arms"][3]["arm"] == "new: <b>=1"
    assert pd.read_csv(io.StringIO(output_of("csv")))["difference"].notna().sum() == 2


def test_incomparable_arms_are_reported(out: Path) -> None:
    plan = Plan.from_json(json.loads((out / "studies" / "new" / "plan.json").read_text()))
    change(out, "loss", analysis=plan.analysis.model_copy(update={"metric": "val/loss", "goal": "min"}))
    with pytest.raises(
        UserError, match="both studies need the same metric; found old by val/accuracy max last and loss by"
    ):
        vitlab.compare("old", "loss", out=out)
    arms = [
        dataclasses.replace(arm, name=f"{arm.name}!", baseline=arm.baseline and f"{arm.baseline}!") for arm in plan.arms
    ]
    renamed = tuple(dataclasses.replace(item, arm=f"{item.arm}!") for item in plan.trials)
    change(out, "other", arms=tuple(arms), trials=renamed)
    with pytest.raises(UserError, match="no arm of other has the name of an arm of old"):
        vitlab.compare("old", "other", out=out)
    changed = [dataclasses.replace(item, trial=dataclasses.replace(item.trial, data="else")) for item in plan.trials]
    change(out, "moved", trials=tuple(changed))
    table = vitlab.compare("old", "moved", out=out)
    assert table["p"].isna().all() and table["difference"].notna().sum() == 2
    assert table["verdict"].dropna().tolist() == ["refused"] * 2 and table["best"].all()
    assert table.answers[0].startswith("refused: ") and "different data" in table.answers[0]


def test_object_in_place_of_a_study_is_named_by_its_type(out: Path) -> None:
    for wrong, name in ((vitlab.compare("old", out=out), "Comparison"), (pd.DataFrame({"a": [1]}), "DataFrame")):
        with pytest.raises(
            UserError, match=rf"first must be a text or a path or a mapping; found an object of type {name}$"
        ):
            vitlab.compare(wrong)


def test_study_is_not_compared_with_itself_but_with_its_versions(out: Path) -> None:
    with pytest.raises(UserError, match=r"both are the same run of old; .* 'vitlab compare old@VERSION old', which"):
        vitlab.compare("old", "old", out=out)
    plan, store = open_study("old", out=out)
    report = compare_studies((dataclasses.replace(plan, version="0" * 64), store), (plan, store))
    assert report.arms[0]["arm"] == "old@00000000: baseline"
    assert all("reached the same val/accuracy at each of 5 seeds" in answer for answer in report.answers)
