"""Explanations of trained models: pictures of what they attend to, and the similarity of their features.

They are computed from the kept weights, independently of training: old trials can be explained at any time, and
changes to the pictures require no retraining.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.pixels import IGNORED, VOID
from vitlab.data.prepare import Feed, prepare
from vitlab.errors import UserError, VitlabError, count
from vitlab.explain import pictures
from vitlab.explain.measures import MIN_BATCH, grams_of_blocks, linear_cka
from vitlab.explain.one_image import Explanation, Head, Label, Subject, explain
from vitlab.identity.trial import Trial
from vitlab.models.vit import ViT
from vitlab.plan.sources import images_of
from vitlab.plan.values import Plan, Planned
from vitlab.registry import slot
from vitlab.runner.models import dtype_of, load_vit
from vitlab.spec import Choice
from vitlab.store.files import folder_name, read_json
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.locks import Busy
from vitlab.training.artifacts import Transform

if TYPE_CHECKING:
    import pandas as pd

BATCH = 128  #: images of a batch

Say = Callable[[str], None]


def draw_arms(plan: Plan, store: Store, images: Sequence[int], say: Say = lambda sentence: None) -> list[str]:
    """Explain images for the first seed of every arm whose trial has ended, unless already explained.

    Args:
        plan: the study.
        store: the store of its trials.
        images: indices in the test split.
        say: called with a sentence before each arm.

    Returns:
        A sentence for every arm that could not be explained; this does not fail the study.
    """
    sentences = []
    for arm, planned in plan.first_trials.items():
        folder = store.folder(planned.trial)
        missing = [index for index in images if not _place(folder, index).exists()]
        if not missing or not folder.done():
            continue
        try:
            with folder.lease():
                say(f"drawing what {arm} attends to in {count(len(missing), 'test image')}")
                if objective := objective_without_labels(read_json(folder.spec)):
                    say(f"{arm} is explained without predictions: objective '{objective}' trains none")
                draw_images(folder, missing)
        except Busy:
            sentences.append(f"{arm} is not explained: another process is writing its trial; run again to explain it")
        except (VitlabError, NotImplementedError) as error:
            sentences.append(f"{arm} is not explained: {error}")
    return sentences


def draw_images(folder: TrialFolder, images: Sequence[int]) -> None:
    """Write explanations of test images to a trial's folder, each atomically.

    The caller holds the trial's lease.

    Raises:
        UserError: if the trial's model has no attention, or the test split has no such image.
        WeightsError: if the trial kept no weights.
    """
    model, transform = load_vit(folder)
    spec = read_json(folder.spec)
    # The subject names no arm or study, because the same trial may belong to several.
    trial = f"trial {folder.path.parent.name[:12]}, seed {spec['seeds']['init']}"
    for index, (pixels_CHW, label) in zip(images, test_examples(spec, images), strict=True):
        place = _place(folder, index)
        temporary = folder.path / f".explain.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        subject = Subject(trial, f"test image {index}", label)
        try:
            draw_image(model, transform, spec, pixels_CHW, subject, temporary)
            place.parent.mkdir(exist_ok=True)
            os.replace(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        folder.emit("artifact", path=str(place.relative_to(folder.path)))


def draw_image(
    model: ViT,
    transform: Transform,
    trial: Mapping[str, Any] | None,
    picture: Any,
    subject: Subject,
    out: Path,
) -> Explanation:
    """Write the explanation of one image by :func:`~vitlab.explain.one_image.explain`.

    Args:
        model: a trained ViT.
        transform: from images to its input.
        trial: the content of the trial's ``spec.json``; None for a file of weights.
        picture: an image, as the transform takes it.
        subject: the model and the image, as its pictures name them.
        out: a folder; created if it does not exist.
    """
    info, x_BCHW = transform.input_spec.info, transform(picture)
    image_HWC = transform.denormalize(x_BCHW)[0].permute(1, 2, 0)
    head: Head = "multilabel" if info.task == "multilabel" else "trained"
    if objective_without_labels(trial):
        head = "untrained"
    return explain(model, x_BCHW, image_HWC, info.labels, out, subject, head=head)


def objective_without_labels(trial: Mapping[str, Any] | None) -> str | None:
    """Return the name of a trial's objective if it does not train predictions on labels; None if it does.

    Args:
        trial: the content of the trial's ``spec.json``; None for a file of weights.
    """
    if trial is None:
        return None
    choice = Choice.of(trial["spec"]["train"]["objective"])
    component: Any = slot("objective").find(choice.type)[0]
    return None if component.labels else choice.type


def test_examples(trial: Mapping[str, Any], images: Sequence[int]) -> list[tuple[Tensor, Label]]:
    """Return images of a trial's own test split by index, each uint8 (C, H, W), with the truth.

    Args:
        trial: the content of the trial's ``spec.json``.
        images: indices, from 0.

    Raises:
        UserError: if the split has no such image.
    """
    prepared = prepare(slot("dataset").resolve(trial["spec"]["data"]), trial["seeds"])
    subset, names = prepared.test, prepared.info.labels
    for index in images:
        if index >= len(subset):
            raise UserError(f"there is no test image {index}: the split has {len(subset)}, counted from 0")
    position_N = torch.tensor(list(images))
    y_N = subset.y_N[position_N]
    truth: list[Label] = [_truth(y, names) for y in y_N]
    return list(zip(subset.at(position_N), truth, strict=True))


def _truth(y: Tensor, names: Sequence[str]) -> Label:
    if y.ndim == 1:
        return ", ".join(names[index] if names else str(index) for index in y.nonzero()[:, 0].tolist())
    if y.ndim:
        label_HW: NDArray[np.int64] = y.long().where(y != VOID, IGNORED).numpy()
        return label_HW
    return names[int(y)] if names else str(int(y))


def _place(folder: TrialFolder, index: int) -> Path:
    return folder.path / "explain" / f"test-{index}"


# -- similarity of features: linear CKA between arms, and between seeds of one arm -------------------------------------


@dataclass(frozen=True)
class Similarity:
    """Similarity of the features of two arms, or of one arm and itself under other seeds."""

    first: str
    second: str  #: equal to ``first`` for the seeds of one arm
    seeds: tuple[tuple[int, int], ...]  #: the pairs of seeds
    cka_PLM: NDArray[np.float64]  #: by pair of seeds, block of the first and block of the second

    def sentence(self) -> str:
        """Return the similarity of the last blocks in one sentence, with its range over pairs of seeds."""
        last_P = self.cka_PLM[:, -1, -1]
        who = f"{self.first}, other seeds" if self.first == self.second else f"{self.first} and {self.second}"
        pairs = count(len(last_P), "pair")
        span = "" if len(last_P) == 1 else f"{last_P.min():.2f} to {last_P.max():.2f}, "
        return f"{who}: {last_P.mean():.2f} ({span}{pairs} of seeds)"


def compare_features(
    plan: Plan, store: Store, arms: Sequence[str] = (), *, images: int = 512, say: Say = lambda sentence: None
) -> list[Similarity]:
    """Return the similarities of all pairs of arms, after the similarities of each arm's seeds.

    Pairs of arms are compared under different seeds, as the seeds of one arm are, so that equal initial values and
    orders of images do not count as similarity; only arms of one seed are compared under it.

    Args:
        plan: the study.
        store: the store of its trials.
        arms: names of arms; by default all that have a ViT with stored weights.
        images: number of validation images, the first ones; of more than a batch, whole batches are read.
        say: called with a sentence for each model that is read, and for each arm that is left out.

    Raises:
        UserError: if there are fewer than two models, they have different validation images, or one that is named in
            ``arms`` has no blocks or no stored weights.
    """
    names = list(dict.fromkeys(arms or (planned.arm for planned in plan.trials)))
    grams: dict[str, dict[int, list[Tensor]]] = {}
    reference: tuple[str, Any] | None = None
    for planned in _planned(plan, names):
        who = f"{planned.arm}, seed {planned.seed}"
        try:
            model, _ = load_vit(store.folder(planned.trial))
        except VitlabError as error:
            if arms:
                raise UserError(f"{who}: {error}") from None
            say(f"{who} is left out: {error}")
            continue
        say(f"reading {who}")
        identity, batches = _validation_images(planned.trial, images)
        if reference is None:
            reference = who, identity
        elif identity != reference[1]:
            raise UserError(
                f"{who} has other validation images than {reference[0]}, and CKA compares features of the same ones; "
                "name arms of equal data with --arm, and keep the stream 'split' out of seeds.vary"
            )
        grams.setdefault(planned.arm, {})[planned.seed] = grams_of_blocks(model, batches)
    if sum(map(len, grams.values())) < 2:
        raise UserError(f"study '{plan.study}' has no two trained ViTs to compare; run it with run.keep: last")
    ordered = sorted(combinations_with_replacement(grams, 2), key=lambda pair: pair[0] != pair[1])
    return [each for pair in ordered if (each := _similarity(*pair, grams)) is not None]


def write(similarities: Sequence[Similarity], study: str, out: Path) -> list[Path]:
    """Write every number to ``cka.csv``, and a picture of each pair of arms; return the files.

    A picture has three matrices: the two arms, and the seeds of each arm.  Arms whose models are alike are as similar
    to each other as the seeds of one arm are.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "cka.csv"]
    table(similarities).to_csv(files[0], index=False)
    own = {each.first: each for each in similarities if each.first == each.second}
    compared = [each for each in similarities if each.first != each.second] or list(own.values())
    for each in compared:
        beside = [own[arm] for arm in dict.fromkeys((each.first, each.second)) if arm in own and each is not own[arm]]
        matrices = [
            (one.first, f"{one.second}{', other seeds' if one.first == one.second else ''}", one.cka_PLM.mean(0))
            for one in (each, *beside)
        ]
        figure = pictures.similarities(matrices)
        what = f"{each.first} and {each.second}; mean over {count(len(each.seeds), 'pair')} of seeds"
        pictures.add_caption(figure, f"study {study}; {what}")
        files.append(out / f"{folder_name(f'cka {each.first}, {each.second}')}.png")
        figure.savefig(files[-1], dpi=150)
    return files


def table(similarities: Sequence[Similarity]) -> pd.DataFrame:
    """Return every number in long form: ``first, second, first_seed, second_seed, first_block, second_block, cka``."""
    import pandas as pd

    rows = [
        (each.first, each.second, *seeds, first + 1, second + 1, value)
        for each in similarities
        for seeds, cka_LM in zip(each.seeds, each.cka_PLM, strict=True)
        for (first, second), value in np.ndenumerate(cka_LM)
    ]
    names = ["first", "second", "first_seed", "second_seed", "first_block", "second_block", "cka"]
    return pd.DataFrame(rows, columns=names)


def _planned(plan: Plan, arms: Sequence[str]) -> Iterator[Planned]:
    """Yield the trials of some arms in their order.

    Raises:
        UserError: if there is no such arm.
    """
    for arm in arms:
        trials = [planned for planned in plan.trials if planned.arm == arm]
        if not trials:
            plan.find(arm, 0)  # raises, with the arms that exist
        yield from trials


def _similarity(first: str, second: str, grams: Mapping[str, Mapping[int, list[Tensor]]]) -> Similarity | None:
    """Return the similarity of two arms; None for one arm with one seed."""
    if first == second:
        pairs = list(combinations(grams[first], 2))
    else:
        pairs = [(i, j) for i in grams[first] for j in grams[second] if i != j]
        pairs = pairs or [(i, j) for i in grams[first] for j in grams[second]]
    if not pairs:
        return None
    cka_PLM = np.stack([linear_cka(grams[first][i], grams[second][j]).numpy() for i, j in pairs])
    return Similarity(first, second, tuple(pairs), cka_PLM)


def _validation_images(trial: Trial, images: int) -> tuple[Any, Iterator[Tensor]]:
    """Return what identifies the first validation images of a trial, and these in batches as its model reads them.

    Raises:
        UserError: if there are too few.
    """
    data = slot("dataset").resolve(trial.spec.data)
    prepared = prepare(data, trial.seeds, trial.data)
    available = min(images, len(prepared.val))
    if available < MIN_BATCH:
        raise UserError(f"CKA needs at least {MIN_BATCH} validation images; found {available}")
    size = min(available, BATCH)
    feed = Feed(prepared, data.options["augment"], trial.seeds, dtype=dtype_of(trial.spec.train.precision))
    batches = feed.evaluation("val", size)
    identity = images_of(data, prepared.info.content), tuple(prepared.val.id_N[: available // size * size].tolist())
    return identity, (batch.x_BCHW for _, batch in zip(range(available // size), batches, strict=False))
