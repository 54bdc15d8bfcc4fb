"""Similarity of the features of a study's trained models: linear CKA between arms, and between seeds of one arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.prepare import Feed, prepare
from vitlab.errors import UserError, VitlabError, count
from vitlab.explain import pictures
from vitlab.explain.measures import MIN_BATCH, grams_of_blocks, linear_cka
from vitlab.identity.trial import Trial
from vitlab.plan.sources import images_of
from vitlab.plan.values import Plan, Planned
from vitlab.registry import slot
from vitlab.runner.models import dtype_of, load_vit
from vitlab.store.files import folder_name
from vitlab.store.folders import Store

if TYPE_CHECKING:
    import pandas as pd

BATCH = 128  #: images of a batch

Say = Callable[[str], None]


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
            model, _ = load_vit(store.trial(planned.trial.key, planned.trial.code))
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
    prepared = prepare(data, trial.seeds, None if trial.data is None else str(trial.data))
    available = min(images, len(prepared.val))
    if available < MIN_BATCH:
        raise UserError(f"CKA needs at least {MIN_BATCH} validation images; found {available}")
    size = min(available, BATCH)
    feed = Feed(prepared, data.options["augment"], trial.seeds, dtype=dtype_of(trial.spec.train.precision))
    batches = feed.evaluation("val", size)
    identity = images_of(data, prepared.info.content), tuple(prepared.val.id_N[: available // size * size].tolist())
    return identity, (batch.x_BCHW for _, batch in zip(range(available // size), batches, strict=False))
