"""Tests of how ``vitlab.judge`` reads tables: formats, roles of columns, goals, units, lost trainings."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import vitlab
from vitlab.errors import UserError
from vitlab.judging.criterion import infer_goal
from vitlab.judging.judgement import judge
from vitlab.registry import slot
from vitlab.report.notebook import Comparison
from vitlab.statistics.power import sequential_levels
from vitlab.training.metrics import metric as metrics

VALUES = {"vit": [0.81, 0.82, 0.83], "rope": [0.91, 0.93, 0.92]}
MEANS = {"vit": 0.82, "rope": 0.92}
LONG = "arm,seed,acc\n" + "".join(f"{a},{s},{v}\n" for a, values in VALUES.items() for s, v in enumerate(values))
WIDE = "seed,vit,rope\n0,0.81,0.91\n1,0.82,0.93\n2,0.83,0.92\n"


def judged(folder: Path, content: str | bytes, name: str = "r.csv", **options: Any) -> Comparison:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return judge(file, **{"metric": "acc", "arm": "arm", **options})


def means(judgement: Comparison) -> Mapping[str, float]:
    return dict(judgement[["arm", "mean"]].itertuples(index=False, name=None))


def counts(judgement: Comparison) -> Mapping[str, tuple[int, int, int]]:
    """Return arm to trainings that are done, diverged and failed."""
    frame = judgement
    return {row.arm: (row.done, row.diverged, row.failed) for row in frame.itertuples()}


def refusal(folder: Path, content: str | bytes, name: str = "r.csv", **options: Any) -> str:
    with pytest.raises(UserError) as error:
        judged(folder, content, name, **options)
    assert all(line.startswith(str(folder / name)) for line in str(error.value).split("\n"))
    return str(error.value)


# -- formats ----------------------------------------------------------------------------------------------------------


FRAME = pd.DataFrame([(a, s, v) for a, vs in VALUES.items() for s, v in enumerate(vs)], columns=["arm", "seed", "acc"])
RECORDS = FRAME.to_dict("records")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.csv", LONG.replace(",", ";").replace(".", ",")),
        ("r.csv", LONG.replace(",", "\t")),
        ("r.csv", LONG.replace(",", "|")),
        ("r.csv", ("sep=;\n" + LONG.replace(",", ";")).replace("\n", "\r\n")),
        ("r.csv", b"\xef\xbb\xbf" + LONG.encode()),
        ("r.csv", LONG.encode("utf-16")),
        ("r.csv", LONG.replace(",", "  ,  ")),
        ("r.csv", "\n\n# made on monday, by me\n" + LONG.replace("rope,0", "# with rotary, now\nrope,0")),
        ("r.csv", LONG.replace("\n", ",\n")),
        ("r.csv", LONG + ",,\n\n"),
        ("r.tsv", LONG.replace(",", "\t")),
        ("r.json", json.dumps(RECORDS)),
        ("r.json", json.dumps(FRAME.to_dict("list"))),
        ("r.json", FRAME.to_json()),
        ("r.json", "\n".join(map(json.dumps, RECORDS))),
        ("r.jsonl", "\n".join(map(json.dumps, RECORDS)) + "\n\n"),
    ],
)
def test_table_is_read_in_every_form(tmp_path: Path, name: str, content: str | bytes) -> None:
    assert means(judged(tmp_path, content, name)) == pytest.approx(MEANS, rel=1e-15)


def test_letters_of_other_encodings_are_read_and_said(tmp_path: Path) -> None:
    judgement = judged(tmp_path, LONG.replace("vit", "v\u00eft").encode("latin-1"))
    assert "v\u00eft" in means(judgement) and "The file is not UTF-8" in judgement.notes[0]


def test_nested_json_and_parquet_with_an_index_are_read(tmp_path: Path) -> None:
    nested = [{"arm": r["arm"], "config": {"seed": r["seed"]}, "metrics": {"val": {"acc": r["acc"]}}} for r in RECORDS]
    options = {"metric": "metrics.val.acc", "seed": "config.seed"}
    assert means(judged(tmp_path, json.dumps(nested), "r.json", **options)) == pytest.approx(MEANS)
    lines = "\n".join(map(json.dumps, nested))
    assert means(judged(tmp_path, lines, "r.jsonl", **options)) == pytest.approx(MEANS)
    FRAME.set_index(["arm", "seed"]).to_parquet(tmp_path / "r.parquet")
    assert means(judge(tmp_path / "r.parquet", metric="acc", arm="arm", seed="seed")) == pytest.approx(MEANS)


def test_sheet_is_read_or_its_library_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.xlsx"
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in ([], ["arm ", "seed", "acc"], *FRAME.values.tolist()):
        book.active.append(row)
    book.create_sheet("other")
    book.save(file)
    judgement = judge(file, metric="acc", arm="arm")
    assert means(judgement) == pytest.approx(MEANS) and "Of 2 sheets, the first is read: Sheet." in judgement.notes
    frame = FRAME.set_index(["arm", "seed"])  # whose cells of equal arms are merged
    frame.to_excel(file)
    text = r"no 'arm' in row 3; row 4; row 6; row 7; .*, as of merged cells: frame\['arm'\]\.ffill\(\) in pandas"
    with pytest.raises(UserError, match=text):
        judge(file, metric="acc", arm="arm")
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    with pytest.raises(UserError, match="needs openpyxl; type pip install openpyxl"):
        judge(file, metric="acc", arm="arm")


def test_frames_are_read_with_their_index() -> None:
    for frame in (FRAME, FRAME.set_index(["arm", "seed"]), FRAME.query("seed >= 0").iloc[::-1].iloc[::-1]):
        assert means(vitlab.judge(frame, metric="acc", arm="arm")) == pytest.approx(MEANS)
    wide = FRAME.pivot(index="seed", columns="arm", values="acc")
    assert means(vitlab.judge(wide, metric="acc")) == pytest.approx(MEANS)
    with pytest.raises(
        UserError, match="results: a frame, the path of a table or a URI is allowed; found an empty list"
    ):
        judge([], metric="acc")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="several levels"):
        judge(FRAME.pivot(index="seed", columns="arm"), metric="acc")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.csv", LONG.encode("utf-16-le"), "it holds bytes that are no text; save it as UTF-8"),
        ("r.csv", bytes(range(256)), "it holds bytes that are no text"),
        ("r.csv", "", "it is empty"),
        ("r.csv", "| arm | seed | acc |\n|---|---|---|\n| a | 0 | 0.5 |\n", "it seems to be a table in Markdown"),
        ("r.csv", "arm,seed,acc\na,0,0,81\na,1,0,82\n", "line 2: more cells than the header"),
        ("r.csv", "arm,seed,acc\na,0,0.81\na,1,0,82\n", "line 3: more cells than the header"),
        ("r.csv", f"Results (May)\n{LONG}", "line 2: more cells than the header; a cell that holds the delimiter"),
        ("r.csv", f"Results (May)\n{LONG}", "and the header is the first line: delete a title above it"),
        ("r.csv", f"Results of May\n{LONG}", "or delete a title above the header"),
        (
            "r.csv",
            f"Results,,\n{LONG}",
            "Columns: Results; Unnamed: 1; Unnamed: 2. If the first row is a title, delete it.",
        ),
        ("r.csv", "arm seed acc\na 0 0.5\n", "its header has one column; write commas, semicolons, tabs or bars"),
        ("r.csv", "vit,0,0.81\nvit,1,0.82\n", "no column 'arm'. Columns: vit; 0; 0.81."),
        ("r.csv", "arm,seed,acc,acc\na,0,0.5,0.6\n", "several columns are called 'acc'; rename all but one"),
        ("r.json", "[" * 100_000, "its brackets are nested too deeply"),
        ("r.jsonl", "[" * 100_000, "its brackets are nested too deeply"),
        ("r.jsonl", '{"arm": "a"}\n{"arm": \n', "line 2: Expecting value"),
        ("r.json", '{"lr": 1, "depth": 2}', "no column 'arm'. Columns: lr; depth."),
        ("r.json", FRAME.to_json(orient="split"), 'a table is a list of objects such as [{"arm": "a"'),
        ("r.json", '{"arm": ["a", "b"], "acc": [0.5]}', "or an object of columns"),
        ("r.jsonl", "[1, 2]", "an object a line"),
        ("r.parquet", b"PAR1", "cannot be read as parquet"),
        ("r.xlsx", b"PK", "it is no workbook of Excel; save it as .xlsx or as .csv"),
    ],
)
def test_file_that_cannot_be_read_is_refused_with_sentence(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    assert message in refusal(tmp_path, content, name)


# -- cells ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["0,5", "12,25", "3"], [0.5, 12.25, 3]),
        (["\u22121.5", "+2", "1e-3"], [-1.5, 2, 0.001]),
        (["0.1000000000000000055511151231257827", "1.", ".5"], [0.1, 1.0, 0.5]),
    ],
)
def test_numbers_are_read_as_their_column_writes_them(tmp_path: Path, cells: list[str], numbers: list[float]) -> None:
    content = "arm;seed;loss\n" + "".join(f"a;{seed};{cell}\n" for seed, cell in enumerate(cells))
    assert means(judged(tmp_path, content, metric="loss"))["a"] == pytest.approx(np.mean(numbers), rel=1e-15)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            ["1,200", "1,300"],
            "'1,200' in line 2 of column 'loss'; '1,300' in line 3 of column 'loss': commas may stand",
        ),
        (
            ["0,81", "0.82"],
            "'0,81' in line 2 of column 'loss', unlike '0.82' in line 3 of column 'loss': commas may stand",
        ),
        (
            ["n/a?", "3", "0.81", "0.82", "0,83", "0.84", "0,83"],
            ".csv: '0,83' in line 6 of column 'loss'; '0,83' in line 8 of column 'loss', unlike '0.81' in line 4 of",
        ),
        (["x", "0.5", "x"], ".csv: 'x' in line 4 of column 'loss' is not a number"),
        (["n/a?", "81 %", "82", "83 %"], ".csv: '82' in line 4 of column 'loss', unlike '81 %' in line 3 of column"),
        (["51.9 +/- 1.4"], "'51.9 +/- 1.4' in line 2 of column 'loss' is a mean with its spread; write the value of"),
        (["51.9\u00b11.4"], "is a mean with its spread"),
        (["51.9 (1.4)"], "is a mean with its spread"),
        (["51.9 [50, 53]"], "is a mean with its spread"),
        (["51.9 \\pm 1.4"], "is a mean with its spread"),
        (["1_0"], "'1_0' in line 2 of column 'loss' is not a number"),
        (["\uff11"], "'\uff11' in line 2 of column 'loss' is not a number"),
        (["1,200.5"], "is not a number"),
        (["0x1A"], "is not a number"),
        (["#DIV/0!"], "is not a number"),
        (["81 %", "0.82"], "'0.82' in line 3 of column 'loss', unlike '81 %' in line 2 of column 'loss': write the"),
        (
            ["81 %", "0.82", "0.83"],
            "'81 %' in line 2 of column 'loss', unlike '0.82' in line 3 of column 'loss': write the",
        ),
    ],
)
def test_cell_that_is_no_value_is_refused_with_its_place(tmp_path: Path, cells: list[str], message: str) -> None:
    content = "arm;seed;loss\n" + "".join(f"a;{seed};{cell}\n" for seed, cell in enumerate(cells))
    assert message in refusal(tmp_path, content, metric="loss")


@pytest.mark.parametrize(
    ("cell", "diverged"),
    [
        *(
            (cell, False)
            for cell in ("", "-", "\u2013", "n.a.", "N/A", "NaN", "null", "None", "crashed", "OOM", "#N/A")
        ),
        *((cell, True) for cell in ("inf", "-Inf", "diverged", "1.7976931348623157e+308", "1e308", "-1e200")),
    ],
)
def test_training_without_value_is_a_lost_seed(tmp_path: Path, cell: str, diverged: bool) -> None:
    judgement = judged(tmp_path, LONG.replace("0.82", cell, 1))
    assert counts(judgement)["vit"] == (2, int(diverged), int(not diverged))
    assert "Warning: 1 lost seed, without a value: vit, seed 1." in judgement.notes
    assert judgement["lost"].tolist()[1] == 1


def test_lost_seeds_of_numbers_are_those_of_texts(tmp_path: Path) -> None:
    frame = FRAME.assign(acc=[0.81, np.nan, 0.83, 0.91, np.inf, 0.92])
    for suffix, write in (("csv", frame.to_csv), ("parquet", frame.to_parquet)):
        write(tmp_path / f"r.{suffix}", index=False)
        judgement = judge(tmp_path / f"r.{suffix}", metric="acc", arm="arm")
        assert counts(judgement) == {"vit": (2, 0, 1), "rope": (2, 1, 0)}


@pytest.mark.parametrize("name", ["None", "NA", "null", "n/a", "nan", "-", "#1", "mean"])
def test_any_word_may_be_the_name_of_an_arm(tmp_path: Path, name: str) -> None:
    assert means(judged(tmp_path, LONG.replace("rope", name))).keys() == {"vit", name}


# -- roles of columns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        WIDE,
        WIDE.replace("seed", ""),
        WIDE.replace("seed", "Unnamed: 0"),
        WIDE.replace("seed", "index"),
        WIDE.replace("seed", "run"),
        WIDE.replace("seed", "config.random_seed"),
        "\n".join(f"{'' if row == 0 else row - 1},{line}" for row, line in enumerate(WIDE.split("\n")[:-1])),
        "Created,Name,Runtime," + WIDE.replace("\n", "\nx,y,1,", 3)[:-1],
        WIDE + "mean,0.82,0.92\nstd,0.01,0.01\n",
    ],
)
def test_columns_of_seeds_and_numbers_are_no_arms(tmp_path: Path, content: str) -> None:
    judgement = judged(tmp_path, content, arm=None)
    assert means(judgement) == pytest.approx(MEANS)
    assert judgement["pairs"].tolist()[1] == 3


def test_columns_called_arm_and_seed_need_no_option(tmp_path: Path) -> None:
    judgement = judged(tmp_path, LONG, arm=None)
    assert means(judgement) == pytest.approx(MEANS) and judgement["pairs"].tolist()[1] == 3
    assert judgement.notes[:2] == ("Arms are those of column 'arm'.", "Seeds are those of column 'seed'.")
    assert "Test at equal seeds: paired t over 3 pairs." in judgement.notes
    columns = judged(tmp_path, WIDE.replace("rope", "arm"), arm=None)  # no column has the metric's name
    assert means(columns).keys() == {"vit", "arm"}
    # A column 'arm' of names holds no values, so that the metric is a column, too, and this one is unknown.
    with pytest.raises(UserError) as raised:
        judged(tmp_path, LONG, arm=None, metric="accc")
    assert str(raised.value).endswith("no column 'accc'. Did you mean 'acc'? Columns: acc; arm; seed.")
    # A column of names that is called nearly so is no arm either.
    message = refusal(tmp_path, LONG.replace("arm", "Arms"), arm=None, metric="accc")
    assert "no column 'accc'. Did you mean 'acc'?" in message
    assert "with arm (found: Arms). Did you mean 'Arms'?" in message


@pytest.mark.parametrize(
    ("content", "arm", "message"),
    [
        (WIDE.replace("seed", "Step"), None, "column Step: rows are moments of trainings; judge needs the final value"),
        (WIDE.replace("seed", "epoch"), None, "export the table of runs in place of a chart"),
        (WIDE.replace("seed", "trainer/global_step"), None, "rows are moments of trainings"),
        ("a - acc,a - acc__MIN,a - acc__MAX\n0.5,0.4,0.6\n", None, "columns a - acc__MIN; a - acc__MAX: rows are"),
        ("Wall time,Step,Value\n1.5,1,0.5\n", None, "column Step: rows are moments of trainings"),
        (LONG.replace("arm", "net"), None, "'acc' is a column: name the column of the arms with arm (found: net)"),
        (LONG.replace("arm", "name"), None, "name the column of the arms with arm (found: name)"),
        *(
            (
                f"model,{columns[0]},{columns[1]},loss_1\nvit,0.81,0.82,1\nrope,0.91,0.92,2\n",
                arm,
                f"columns {columns[0]}; {columns[1]} may hold acc of a seed each; pandas makes rows: "
                "frame.melt(['model', 'loss_1'], var_name='seed', value_name='acc')",
            )
            for columns in (("s0", "s1"), ("acc_1", "acc_2"), ("1", "2"), ("fold 1", "fold 2"), ("seed0", "seed1"))
            for arm in (None, "model")
        ),
        *(
            (f"model,data,acc,{column}\na,x,0.9,0.1\nb,x,0.8,0.1\n", "model", f"{column} may be the spread of means")
            for column in ("std", "acc_std", "Acc SD")
        ),
        ("vit_seed_0,vit_seed_1\n0.81,0.82\n", None, "the names vit_seed_0; vit_seed_1 hold seeds"),
        (
            "arm,acc\nvitb_seed_27,0.5\nvitb_seed_28,0.6\n",
            "arm",
            "with arm 'vitb' in one column and its seed in another",
        ),
        ("arm,epoch,acc\na,0,0.5\na,1,0.6\nb,0,0.7\n", "arm", "'epoch' differs between rows of an arm, as steps of"),
        (
            "arm,seed,epoch,acc\na,0,0,0.5\na,0,1,0.6\n",
            "arm",
            "(line 2; line 3), which differ in epoch; judge needs the f",
        ),
        ("arm,seed,data,acc\na,0,x,0.5\na,0,y,0.6\n", "arm", "which differ in data; keep one of them, name a seed"),
        (
            "arm,seed,lr,acc\n" + "".join(f"{a},{s},{lr},0.{s}{lr}\n" for a in "ab" for s in (1, 2) for lr in (1, 2)),
            "arm",
            "or compare within each lr by block; if the arm includes lr, type in pandas "
            "frame['arm'] = frame[['arm', 'lr']].astype(str).agg(' '.join, axis=1)",
        ),
        (
            "arm,seed,status,acc\na,0,done,0.5\na,1,early,0.6\n",
            "arm",
            "'early' in line 3 of column 'status' is no status",
        ),
        (
            WIDE.replace("1,0.82", "0,0.82"),
            None,
            "several values for 2 trainings: 2 rows of arm 'vit' with seed 0 (line 2; line 3); 2 rows of arm 'rope' with",
        ),
        (",vit,rope\ncount,3,3\nmean,0.8,0.9\nstd,0.1,0.1\n", None, "no training remains. Seeds are"),
    ],
)
def test_table_that_holds_no_final_values_is_refused(
    tmp_path: Path, content: str, arm: str | None, message: str
) -> None:
    assert message in refusal(tmp_path, content, arm=arm)


def test_rows_that_are_no_trainings_and_cells_of_mappings_are_named(tmp_path: Path) -> None:
    content = LONG.rstrip("\n") + "".join(f"\n{arm},best,0.9" for arm in ("vit", "rope")) + "\n"
    assert "seeds are numbers and best: leave out rows" in refusal(tmp_path, content, seed="seed")
    runs = "name,summary\na,\"{'acc': 0.9}\"\nb,\"{'acc': 0.8}\"\n"
    assert "summary hold mappings; pandas makes columns of them: pandas.json_normalize(" in refusal(tmp_path, runs)


def test_spread_beside_seeds_or_of_an_option_is_no_spread_of_means(tmp_path: Path) -> None:
    content = LONG.replace("acc\n", "acc,std,init_std\n").replace("1\n", "1,0.1,1\n").replace("2\n", "2,0.1,2\n")
    for options in ({}, {"seed": "seed"}):
        assert means(judged(tmp_path, content, **options)) == pytest.approx(MEANS)
    unseeded = LONG.replace("seed", "init_std")
    assert means(judged(tmp_path, unseeded)) == pytest.approx(MEANS)


def test_arms_that_differ_in_case_or_blanks_are_noted(tmp_path: Path) -> None:
    notes = judged(tmp_path, LONG.replace("vit,2", "Vi T,2")).notes
    assert "Warning: arms that differ in case or blanks alone are different: vit; Vi T." in notes
    assert not any("differ in case" in note for note in judged(tmp_path, LONG).notes)


def test_table_without_seeds_is_said_to_be_unpaired_once(tmp_path: Path) -> None:
    notes = judged(tmp_path, FRAME.drop(columns="seed").to_csv(index=False)).notes
    assert [note for note in notes if "paired" in note or "Welch" in note] == [
        "Without seed the arms are not paired, so that the test is Welch's t: name the column of the seeds if they "
        "share some."
    ]


def test_table_of_one_value_per_arm_and_block_is_not_judged_by_welch() -> None:
    frame = pd.DataFrame(
        {"arm": ["a", "b"] * 4, "data": [*"wwxxyyzz"], "acc": [0.8, 0.9, 0.7, 0.82, 0.5, 0.6, 0.6, 0.72]}
    )
    assert not any("Welch" in note for note in judge(frame, metric="acc", arm="arm", block="data").notes)


def test_options_that_differ_are_noted(tmp_path: Path) -> None:
    lrs = LONG.replace("seed", "lr")
    warning = "Warning: rows of an arm differ in lr, and count as its seeds."
    for table in (lrs, lrs.replace("vit,2,0.83\n", "")):  # also of a run that is lost
        assert any(note.startswith(warning) for note in judged(tmp_path, table).notes)
    searched = FRAME.drop(columns="seed").assign(params_lr=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], rep=[0, 1, 2] * 2)
    notes = judge(searched, metric="acc", arm="arm").notes
    assert any(
        note.startswith("Warning: rows of an arm differ in params_lr, and count as its seeds.") for note in notes
    )
    assert any("name the column of the seeds, which may be 'rep', if they share some." in note for note in notes)
    flags = (
        LONG.replace("seed", "diverged").replace(",0,", ",false,").replace(",1,", ",false,").replace(",2,", ",true,")
    )
    assert not any("differ in" in note for note in judged(tmp_path, flags).notes)
    assert means(judged(tmp_path, lrs, seed="lr")) == pytest.approx(MEANS)
    results = FRAME.assign(host=FRAME["seed"], minutes=range(6), val_loss=FRAME["seed"] / 10, comment="")
    results.loc[1, "comment"] = "slow"
    assert not any("differ" in note for note in judge(results, metric="acc", arm="arm").notes)
    results = results.drop(columns="seed").assign(depth=[1, 1, 1, 2, 2, 2])
    assert means(judge(results, metric="acc", arm="arm")) == pytest.approx(MEANS)
    for lr in ([1, 1, 1, 2, 2, 2], [1, 2, 1, 2, 1, 2]):
        assert (
            "Other columns that differ between arms: lr." in judge(FRAME.assign(lr=lr), metric="acc", arm="arm").notes
        )
    assert not any("differ" in note for note in judge(FRAME.assign(lr=[1, 2, 3] * 2), metric="acc", arm="arm").notes)


@pytest.mark.parametrize("name", ["id", "run", "index", "group", "n", "no"])
def test_column_of_fractions_is_an_arm_whatever_its_name(tmp_path: Path, name: str) -> None:
    assert means(judged(tmp_path, WIDE.replace("rope", name), arm=None)).keys() == {"vit", name}


def test_rows_of_means_and_deviations_are_no_trainings(tmp_path: Path) -> None:
    rows = "".join(f"{arm},{word},0.82\n" for arm in VALUES for word in ("mean", "Std.", "Median"))
    judgement = judged(tmp_path, LONG + rows)
    assert judgement["n"].tolist() == [3, 3] and means(judgement) == pytest.approx(MEANS)
    assert "6 rows left out, no trainings by their 'seed': 'mean', 'Std.', 'Median'." in judgement.notes
    unpaired = "".join(f"{row},{arm},{v}\n" for arm, vs in VALUES.items() for row, v in enumerate(vs))
    judgement = judged(tmp_path, f",arm,acc\n{unpaired}mean,vit,0.87\n")
    assert judgement["n"].tolist() == [3, 3]


def test_row_of_means_in_the_column_of_arms_is_no_arm_unless_it_is_a_training(tmp_path: Path) -> None:
    unseeded = FRAME.drop(columns="seed").to_csv(index=False)
    for table in (LONG + "Mean,,0.87\n", unseeded + "Mean,0.87\n"):
        judgement = judged(tmp_path, table)
        assert means(judgement) == pytest.approx(MEANS) and judgement["family"].dropna().tolist() == [1]
        assert "1 row left out, no trainings by their 'arm': 'Mean'." in judgement.notes
    for table in (LONG.replace("rope", "mean"), unseeded.replace("rope", "mean")):  # such as a way to pool tokens
        assert means(judged(tmp_path, table)).keys() == {"vit", "mean"}


def test_states_of_runs_count_as_their_endings(tmp_path: Path) -> None:
    """Runs as trackers export them: a run that crashed is a lost seed whatever it logged, a running one is none."""
    content = (
        "Name,State,model,seed,acc\na,finished,vit,0,0.81\nb,crashed,vit,1,0.2\nb2,finished,vit,2,0.83\n"
        "c,running,vit,3,0.1\nd,finished,rope,0,0.91\ne,finished,rope,1,0.93\nf,killed,rope,2,\nf2,failed,rope,1,\n"
    )
    judgement = judged(tmp_path, content, arm="model")
    assert counts(judgement) == {"vit": (2, 0, 1), "rope": (2, 0, 1)}
    assert means(judgement) == pytest.approx({"vit": 0.82, "rope": 0.92})
    for note in (
        "Warning: 1 row left out, still running or never ended: line 5.",
        "Values of trainings that failed do not count: line 3.",
        "1 row left out, failed, and repeated with the same arm and seed: line 9.",
        "Warning: 2 lost seeds, without a value: vit, seed 1; rope, seed 2.",
    ):
        assert note in judgement.notes
    flags = judged(tmp_path, "arm,seed,diverged,acc\na,0,False,0.8\na,1,True,0.1\na,2,False,0.82\n")
    assert counts(flags) == {"a": (2, 1, 0)} and means(flags)["a"] == pytest.approx(0.81)
    optuna = content.replace("model,seed", "params_model,params_seed").replace("crashed", "PRUNED")
    for state, name in {"finished": "COMPLETE", "running": "WAITING", "failed": "FAIL"}.items():
        optuna = optuna.replace(state, name)
    exported = judged(tmp_path, optuna, arm="params_model")
    assert counts(exported) == counts(judgement) and exported["pairs"].tolist()[1] == 1
    pruned = LONG.replace("acc", "acc,pruned").replace("1\n", "1,True\n").replace("3\n", "3,False\n")
    assert means(judged(tmp_path, pruned)) == pytest.approx(MEANS), "an option"
    own = judged(
        tmp_path, "arm,seed,status,failure,acc\na,0,done,,0.8\na,1,failed,timeout,\na,2,paused,,\na,3,failed,at x:1,\n"
    )
    assert counts(own) == {"a": (1, 0, 2)}, "as vitlab.results has them"


def test_cells_of_a_table_with_a_column_per_arm(tmp_path: Path) -> None:
    """Without seeds, columns may have different lengths; every other empty cell is a lost seed."""
    assert counts(judged(tmp_path, WIDE.replace("0.93", ""), arm=None)) == {"vit": (3, 0, 0), "rope": (2, 0, 1)}
    ragged = "vit,rope\n0.81,0.91\n,0.93\n0.83,\n0.84,\n"
    assert counts(judged(tmp_path, ragged, arm=None)) == {"vit": (3, 0, 1), "rope": (2, 0, 0)}
    text = refusal(tmp_path, WIDE.replace("0.93", "x"), arm=None)
    assert "'x' in line 3 of column 'rope' is not a number" in text


def test_row_per_model_has_no_seeds_and_no_verdict(tmp_path: Path) -> None:
    content = "model,top1,top1_err\nsmall,81.402,18.598\nbase,84.528,15.472\n"
    judgement = judged(tmp_path, content, arm="model", metric="top1")
    assert judgement["verdict"].tolist()[1] == "cannot tell"
    assert not any(" lost seed" in note for note in judgement.notes)


# -- goals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "names"),
    [
        (
            "max",
            "acc accuracy val/accuracy test_acc1 Top-1 top_5 eval/top1 terrier_acc TerraIncognita_acc transferred_acc mae_top1"
            " mae/linprobe_acc lossless_acc valAcc F1 mIoU AUROC prec@1 balanced_accuracy",
        ),
        (
            "min",
            "loss valLoss error top1_error top1_err err@1 mce test/mce mCE fid FID-50k wer latency_ms flops time params"
            " rmse perplexity test/ece train/loss",
        ),
        (
            None,
            "score extra divergence acc_drop accuracy_gap acc_std loss_ratio time_to_acc acc_per_param neg_loss terror"
            " glossy faccade mae",
        ),
    ],
)
def test_whole_words_tell_the_goal(goal: str | None, names: str) -> None:
    assert {name: infer_goal(name) for name in names.split()} == dict.fromkeys(names.split(), goal)


def test_names_of_metrics_of_vitlab_tell_their_registered_goals() -> None:
    asked_for = {"effective_rank", "top_k", "per_class_accuracy"}  # the last two report other names
    for name in {*slot("metric").names()} - asked_for:
        assert infer_goal(f"val/{name}") == metrics.get(name).goal, name


def test_goal_that_nothing_tells_is_asked_for(tmp_path: Path) -> None:
    content = LONG.replace("acc", "score")
    assert "'score' does not tell whether higher or lower is better; say it by goal, max or min" in refusal(
        tmp_path, content, metric="score"
    )
    for goal, verdict in (("max", "better"), ("min", "worse")):
        assert judged(tmp_path, content, metric="score", goal=goal)["verdict"].tolist()[1] == verdict


# -- units ------------------------------------------------------------------------------------------------------------


def scaled(factor: float, sign: str = "", metric: str = "acc") -> str:
    rows = [f"{a},{s},{factor * v:.6f}{sign}\n" for a, values in VALUES.items() for s, v in enumerate(values)]
    return f"arm,seed,{metric}\n{''.join(rows)}"


@pytest.mark.slow
def test_values_stand_in_the_units_of_the_column(tmp_path: Path) -> None:
    for content, metric, unit, mean in (
        (scaled(1), "acc", "share", 0.82),
        (scaled(100), "acc", "%", 82),
        (scaled(1, " %", "err"), "err", "%", 0.82),
        (scaled(100, "%"), "acc", "%", 82),
        (scaled(1, metric="err (%)"), "err (%)", "%", 0.82),
        (scaled(1, metric="err_pct"), "err_pct", "%", 0.82),
        (scaled(1, metric="err"), "err", "number", 0.82),
        (scaled(1, metric="val_ece"), "val_ece", "number", 0.82),
        (scaled(1000), "acc", "number", 820),
        (scaled(0.5, metric="loss"), "loss", "number", 0.41),
    ):
        judgement = judged(tmp_path, content, metric=metric)
        assert (means(judgement)["vit"], *judgement.report.units.values()) == (pytest.approx(mean), unit), metric
    judgement = judged(tmp_path, scaled(1, metric="err"), metric="err")
    assert "rope is 0.100 above vit" in judgement.answers[0]
    assert any("'err' may be a share or percent" in note for note in judgement.notes)
    assert "in percent by its name, and no value exceeds 1" in refusal(
        tmp_path, scaled(1, metric="acc (%)"), metric="acc (%)"
    )


@pytest.mark.parametrize(
    "content",
    [
        LONG.replace("rope,0,0.91", "rope,0,91").replace("0.93", "93").replace("0.92", "92"),
        LONG.replace("0.82", "82"),
        LONG.replace("0.92", "92").replace("0.93", "93"),
    ],
)
def test_shares_beside_percents_are_refused(tmp_path: Path, content: str) -> None:
    assert "'acc' seems to hold shares and percents: values to 0." in refusal(tmp_path, content)


def test_collapsed_arm_in_percent_is_no_share(tmp_path: Path) -> None:
    content = "arm,seed,acc (%)\na,0,81\na,1,82\nb,0,0.9\nb,1,0.8\n"
    assert means(judged(tmp_path, content, metric="acc (%)"))["b"] == pytest.approx(0.85)
    assert means(judged(tmp_path, content.replace(" (%)", "").replace("0.9", "0.1").replace("0.8", "0.1")))["b"] == 0.1


def test_values_that_no_share_has_are_noted(tmp_path: Path) -> None:
    for value, ends in (("-1", "-1 to 0.93"), ("999", "0.81 to 999")):
        [note] = [note for note in judged(tmp_path, LONG.replace("0.83", value)).notes if "no share" in note]
        assert f"'acc' has values from {ends}, so it is no share" in note and "leave their cells empty" in note
    assert judged(tmp_path, scaled(100, metric="mAP"), metric="mAP").report.units == {"mAP": "%"}


@pytest.mark.slow
def test_margin_is_in_units_of_the_column_or_in_points(tmp_path: Path) -> None:
    for content, margin, amount in (
        (scaled(1), 0.005, 0.005),
        (scaled(1), "0.5 points", 0.005),
        (scaled(100), 0.5, 0.5),
        (scaled(100), "0.5", 0.5),
        (scaled(100), "1 point", 1),
        (scaled(1, metric="err"), 0.5, 0.5),
    ):
        metric = content.partition("\n")[0].split(",")[2]
        judgement = judged(tmp_path, content, metric=metric, margin=margin)
        assert judgement.report.analysis.margin == pytest.approx(amount)
    for margin, content, message in (
        (0.5, scaled(1, metric="loss"), ""),
        ("0.5 points", scaled(1, metric="loss"), "'loss' is no share, so that it has no points; write a number"),
        (0.5, scaled(1), "margin 0.5: write it in points, of which 'acc' has 0 to 100, as '0.5 points'"),
        ("100 points", scaled(1), "margin 100 points: 'acc' is from 0 to 1; write less"),
        ("2 %", scaled(1), "margin 2 %: a number above 0 in units of the column, or '0.5 points', is allowed"),
        ("-1", scaled(1), "a number above 0"),
        (0, scaled(1), "a number above 0"),
        ("1.2.3", scaled(1), "a number above 0"),
    ):
        metric = content.partition("\n")[0].split(",")[2]
        if message:
            assert message in refusal(tmp_path, content, metric=metric, margin=margin)


def test_lost_seeds_are_judged_with_chance(tmp_path: Path) -> None:
    for factor, options, chance in (
        (1, {"chance": 0.2}, 0.2),
        (100, {"chance": 90, "metric": "err"}, 90),
    ):
        metric = options.get("metric", "acc")
        content = scaled(factor, metric=metric).replace("rope,1,", "rope,1,nan").replace("nan93", "nan")
        content = "\n".join(line if "nan" not in line else "rope,1,nan" for line in content.split("\n"))
        row = judged(tmp_path, content, **{"metric": metric, **options}).iloc[1]
        assert (row["lost"], row["chance"]) == (1, pytest.approx(chance))
    # Comparisons of unlike seeds share variances once chance stands in the place of lost seeds.
    three = LONG + "vit,3,0.84\nrope,3,0.94\nnone,0,0.72\nnone,1,0.75\nnone,2,0.74\nnone,3,\n"
    several = judged(tmp_path, three.replace("rope,1,0.93", "rope,1,"), chance=0.1)
    assert several["shared"].tolist()[1:] == [1, 1] and several["chance_shared"].tolist()[1:] == [2, 2]
    [note] = [note for note in several.notes if "variance of a difference is averaged" in note]
    assert "of the 2 comparisons that share baseline and seeds, with chance in the place of lost seeds, and" in note
    unpaired = judged(tmp_path, three.replace("rope,1,0.93", "rope,1,").replace("seed", "note"), chance=0.1)
    assert all("; with chance (10.0 %) in" in text for text in (*several.answers, *unpaired.answers))
    assert not any("both have" in text for text in unpaired.answers)
    for options, message in (
        ({"chance": 2}, "chance 2 is no value of 'acc'"),
        ({"images": 100, "metric": "loss"}, "images: the step of 'loss' does not follow"),
        ({"images": 0}, "images 0: a number from 1 to 10^12 is allowed"),
        ({"images": 10**400}, "a number from 1 to 10^12 is allowed"),
    ):
        assert message in refusal(tmp_path, scaled(1, metric=str(options.get("metric", "acc"))), **options)


# -- the whole --------------------------------------------------------------------------------------------------------


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    content = "arm,seed,acc\n,0,0.5\na,,0.6\na,1,x\n"
    text = refusal(tmp_path, content, alpha=0.9, over_blocks="all", goal="up", images=0, looks=[3, 2])
    for part in (
        "alpha 0.9",
        "goal up: allowed: max, min",
        "over_blocks all: allowed: difference, relative",
        "over_blocks needs block",
        "images 0",
        "looks 3, 2: growing numbers of seeds",
        "'x' in line 4 of column 'acc' is not a number",
        "no 'arm' in line 2; fill it in, or leave the row out",
        "no 'seed' in line 3",
    ):
        assert part in text
    content = (
        "# a comment\n\narm,seed,acc\na,0,92.9\n\na,1,92.7%\n# another\na,2,0.933\na,2,92.6\nb,0,94 \u00b1 1\nb,1,94\n"
    )
    text = refusal(tmp_path, content, arm="arm", seed="seed", baseline="c")
    for part in (
        "'94 \u00b1 1' in line 10 of column 'acc' is a mean",
        "'92.7%' in line 6 of column 'acc', unlike '92.9' in line 4 of column 'acc': write the percent sign",
        "several values for 1 training: 2 rows of arm 'a' with seed 2 (line 8; line 9); keep one",
        "no arm 'c'. Arms: a; b.",
        "'acc' seems to hold shares and percents",
    ):
        assert part in text
    text = refusal(tmp_path, LONG, arm="ar", seed="sed", metric="ac")
    assert [line.partition(".csv: ")[2][:14] for line in text.split("\n")] == [
        "no column 'ar'",
        "no column 'sed",
        "no column 'ac'",
    ]
    assert "Did you mean 'seed'?" in text
    # The metric is asked for with what may be one.
    need, none = "metric is missing: name its column, or, if every column is an arm, what these hold", "images 0"
    for content, options, parts in (
        (LONG, {"arm": None}, [f"{need}. Columns of numbers: acc."]),
        (
            LONG.replace("arm", "net"),
            {"arm": None, "seed": "sed"},
            [
                f"{need}. Columns of numbers: acc.",
                "with arm (found: net)",
                "no column 'sed'. Did you mean 'seed'?",
            ],
        ),
        (
            WIDE,
            {"arm": None},
            [f"{need}. Columns of numbers: vit; rope."],
        ),
        (
            "arm,seed0,seed1\na,1,2\n",
            {"arm": "arm"},
            [
                f"{need}. Columns of numbers: seed0; seed1.",
                "columns seed0; seed1 may hold a metric of a seed each",
            ],
        ),
        ("arm,acc\na,1 \u00b1 2\n", {}, [f"{need}. Columns of numbers: none."]),
    ):
        text = refusal(tmp_path, content, metric=None, images=0, **options)
        assert [part in text for part in (*parts, none)] == [True] * (len(parts) + 1) and len(text.split("\n")) == len(
            parts
        ) + 1
    with pytest.raises(UserError) as error:
        judge(tmp_path / "none.csv", metric="acc", arm="arm", alpha=float("nan"))
    assert [line.rpartition(": ")[2] for line in str(error.value).split("\n")][1:] == [
        "a number between 0 and 0.5 is allowed"
    ]


def test_judgement_has_answers_frame_notes_and_formats(tmp_path: Path) -> None:
    judgement = judged(tmp_path, LONG)
    assert len(judgement.answers) == 1
    assert judgement.notes[-1] == "These comparisons were not registered before their results were known."
    assert judgement.answers[0] in " ".join(judgement.render().split())
    assert json.loads(judgement.render("json"))["answers"] == judgement.answers
    assert "<table" in judgement._repr_html_()
    assert judgement.figures["arms"]._repr_png_().startswith(b"\x89PNG"), (
        "without pyplot, a notebook shows it all the same"
    )
    with pytest.raises(UserError) as error:
        judged(tmp_path, LONG, arm="amr")
    assert error.value._render_traceback_() == [f"UserError: {error.value}"]


def test_looks_share_alpha_as_in_a_study(tmp_path: Path) -> None:
    draws = np.random.default_rng(7)
    frame = pd.DataFrame(
        [(a, s, (a == "b") * 0.5 + draws.normal()) for a in "abc" for s in range(6)], columns=["arm", "seed", "loss"]
    )
    once = judge(frame, metric="loss", arm="arm")
    thrice = judge(frame, metric="loss", arm="arm", looks=[3, 4, 6])
    assert thrice["look"].tolist()[1:] == [3, 3] and thrice["looks"].tolist()[1:] == [3, 3]
    assert (thrice["difference"] - once["difference"]).abs().max() < 1e-12
    assert all(", corrected for 2 comparisons and 3 looks)" in answer for answer in thrice.answers)
    assert not any("looks" in answer for answer in once.answers)
    share = sequential_levels((3, 4, 6), 0.05, 2)[-1] / 0.05
    assert thrice["p_corrected"][1:].tolist() == pytest.approx([min(1.0, p / share) for p in once["p_corrected"][1:]])
    far = frame.assign(loss=frame["loss"] + 100.0 * (frame["arm"] == "b"))
    decided = judge(far, metric="loss", arm="arm", looks=[3, 4, 6])
    assert decided["look"].tolist()[1:] == [1, 3]
    with pytest.raises(UserError, match="looks: the last look is at all seeds, 6"):
        judge(frame, metric="loss", arm="arm", looks=[3, 4])
    with pytest.raises(UserError, match="looks: looks are at seeds; name their column with seed"):
        judge(frame.drop(columns="seed"), metric="loss", arm="arm", looks=[3, 6])


@pytest.mark.parametrize(("pairs", "arms", "too_few"), [(5, 2, True), (6, 2, False), (6, 3, True), (7, 3, False)])
def test_sign_flip_of_too_few_pairs_says_that_it_cannot_decide(pairs: int, arms: int, too_few: bool) -> None:
    """The smallest p value of a sign flip, 2 / 2^pairs times the comparisons, is above alpha."""
    assert (2 / 2**pairs * (arms - 1) > 0.05) == too_few
    values = {"a": 0.8, "b": 0.85, "c": 0.86}
    rows = [
        (arm, seed, 0.1 if (arm, seed) == ("b", 0) else value + 0.001 * seed + 0.0003 * seed * (arm != "a"))
        for arm, value in [*values.items()][:arms]
        for seed in range(pairs)
    ]
    answer = judge(pd.DataFrame(rows, columns=["arm", "seed", "acc"]), metric="acc", arm="arm").answers[0]
    assert "1 seed collapsed, so t is not used" in answer
    assert (f"; {pairs} pairs cannot decide)" in answer) == too_few
