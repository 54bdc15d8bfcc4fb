"""How often equal learners are told apart where each seed holds out other images: real learners on real digits.

A study draws some images of scikit-learn's digits.  Every arm is the same learner, and sees a random half of the pixels
of each image, drawn anew for each arm and image: arms are exchangeable, so that no comparison has anything to find on
other images.  Each seed holds out a stratified part of the study's images, and trains on the others.  A study is a
false alarm if any comparison is significant, by the tests of ``vitlab.comparison`` without and with the correction for
overlapping training sets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from tables import ALPHA, markdown

from vitlab.comparison import Verdict
from vitlab.comparison.arrays import VERDICTS, Comparisons, judge_studies
from vitlab.statistics import replicates

Floats = NDArray[np.float64]
Learner = Callable[[Floats, Floats, Floats], Floats]
"""Pixels of training images (arms, images, pixels), their classes as indicators, and pixels of others to scores."""
CLASSES = 10
NEIGHBOURS = 5
STUDIES = (("all", 200, 0.1, 10, 1), ("all", 200, 0.1, 30, 1), ("all", 200, 0.25, 10, 1))
STUDIES += (("all", 200, 0.1, 5, 5), ("all", 200, 0.1, 3, 10), ("a fifth", 400, 0.1, 10, 1))
"""Part of the images that are not held out that is trained on, images, share held out, seeds, comparisons."""


def ridge(train: Floats, classes: Floats, other: Floats) -> Floats:
    """Return the scores of ridge regression on indicators, with penalty 1."""
    centre = train.mean(axis=1, keepdims=True)
    x, share = train - centre, classes.mean(axis=0)
    penalised = x.transpose(0, 2, 1) @ x + np.eye(x.shape[2])
    weights = np.linalg.solve(penalised, x.transpose(0, 2, 1) @ (classes - share))
    return np.asarray((other - centre) @ weights + share)


def centroid(train: Floats, classes: Floats, other: Floats) -> Floats:
    """Return the scores of the nearest class mean."""
    means = classes.T @ train / np.maximum(classes.sum(axis=0), 1)[:, None]
    return np.asarray(other @ means.transpose(0, 2, 1) - (means**2).sum(axis=2)[:, None] / 2)


def neighbours(train: Floats, classes: Floats, other: Floats) -> Floats:
    """Return the votes of the nearest training images."""
    closeness = other @ train.transpose(0, 2, 1) - (train**2).sum(axis=2)[:, None] / 2
    nearest = np.argpartition(closeness, -NEIGHBOURS, axis=2)[:, :, -NEIGHBOURS:]
    return np.asarray(classes[nearest].sum(axis=2))


LEARNERS: dict[str, Learner] = {"ridge": ridge, "nearest mean": centroid, "5 neighbours": neighbours}


def held_out(labels: NDArray[np.int64], share: float, draws: np.random.Generator) -> NDArray[np.bool_]:
    """Return which images are held out: of each class, the share, at least one, and never all."""
    result = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = draws.permutation(np.flatnonzero(labels == label))
        result[rows[: min(max(int(share * len(rows) + 0.5), 1), len(rows) - 1)]] = True
    return result


def simulate(
    learner: Learner, part: float, images: int, share: float, seeds: int, arms: int, studies: int, seed: int = 0
) -> tuple[Floats, float, int]:
    """Return accuracies (study, arm, seed), validation images over training images, and the number of the former.

    Args:
        learner: what every arm is.
        part: of the images that are not held out, trained on.
        images: of a study.
        share: of them, held out.
        seeds: splits.
        arms: in a study.
        studies: how many.
        seed: of the draws.
    """
    pixels, labels = load_digits(return_X_y=True)
    draws = np.random.default_rng([seed, images, seeds, arms])
    values, ratio, count = np.empty((studies, arms, seeds)), 0.0, 0
    for study in range(studies):
        rows = draws.choice(len(labels), images, replace=False)
        y, x = labels[rows], pixels[rows] / 16 * (draws.random((arms, images, pixels.shape[1])) < 0.5)
        for at in range(seeds):
            mask = held_out(y, share, draws)
            train = np.flatnonzero(~mask)
            count, ratio = int(mask.sum()), mask.sum() / len(train)
            if part < 1:
                train = draws.choice(train, int(part * len(train)), replace=False)
            scores = learner(x[:, train], np.eye(CLASSES)[y[train]], x[:, mask])
            values[study, :, at] = (scores.argmax(axis=2) == y[mask]).mean(axis=1)
    return values, float(ratio), count


def section(studies: int, seed: int) -> tuple[str, bool]:
    """Return the table, and whether the corrected tests hold alpha."""
    rows, worst = list[list[str]](), 0.0
    for name, learner in LEARNERS.items():
        for trained, images, share, seeds, m in STUDIES:
            part = 1.0 if trained == "all" else 0.2
            values, ratio, count = simulate(learner, part, images, share, seeds, m + 1, studies, seed)
            rates = []
            for overlap, kind in itertools.product((0.0, ratio), ("own", "shared")):
                design = replace(Comparisons.all_with_first(m), overlap=overlap, variance=kind, quantum=1 / count)
                found = judge_studies(values, design).verdict >= VERDICTS.index(Verdict.BETTER)
                rates.append(float(found.any(axis=1).mean()))
            wider = math.sqrt(1 + seeds * ratio)
            worst = max(worst, *rates[2:])
            differences = values[:, 1] - values[:, 0]
            needed = differences.mean(axis=1).var() / (differences.var(axis=1, ddof=1).mean() / seeds)
            flips = "-"
            if m == 1 and seeds <= 10:
                p = np.array([replicates.sign_flip_p(some) for some in differences])
                flips = f"{100 * (p <= ALPHA).mean():.1f}"
            cells = [name, f"{100 * share:.0f} % of {images}", trained, f"{seeds} x {m}"]
            cells += [f"{100 * rates[0]:.1f} / {100 * rates[1]:.1f}", flips]
            cells += [f"{100 * rates[2]:.1f} / {100 * rates[3]:.1f}", f"{needed:.2f}", f"{wider**2:.2f}"]
            rows.append(cells)
            print(" | ".join(cells), flush=True)
    error = 100 * math.sqrt(ALPHA * (1 - ALPHA) / studies)
    text = (
        "Studies in which something is found and all arms are alike, in percent: own / shared, "
        f"{studies:,} studies a line (standard error of 5 %: {error:.1f}). The last columns are the variance "
        "of a mean difference over that of independent seeds, as simulated and as corrected for.\n\n"
    )
    heads = ["learner", "held out", "trained on", "seeds x comparisons", "not corrected", "sign-flip", "corrected"]
    text += markdown([*heads, "variance", "corrected for"], rows)
    return text, worst <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / studies)
