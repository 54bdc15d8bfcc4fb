"""Explanation of one image: all analyses of a trained model, as pictures and tables.

B images (1 here), L blocks, H heads, T tokens of which P stand before the patches, N patches, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitlab.components.position import encodings_by_prefix
from vitlab.components.position.additive import Additive
from vitlab.explain import measures, pictures
from vitlab.explain.capture import capture
from vitlab.models.vit import ViT

TOP = 5  #: predictions shown
GRIDS = 16  #: position grids along a side of the figure; larger grids are subsampled
Table = Mapping[str, Any]
"""Columns by name."""

Head = Literal["trained", "multilabel", "untrained"]
"""How a model's head was trained: on classes, on any number of classes an image, or, without labels, not at all."""

Label = str | NDArray[np.int64] | None
"""The true class of an image, or of each of its pixels, (H, W); None if it is not known."""


@dataclass(frozen=True)
class Subject:
    """The model and the image of an explanation, as its pictures name them."""

    model: str  #: such as "study first, arm baseline, seed 0"
    image: str  #: such as "test image 3"
    label: Label = None  #: the truth, where it is known

    @property
    def class_name(self) -> str | None:
        """Return the true class of the image; None if it is not known, or if every pixel has its own."""
        return self.label if isinstance(self.label, str) else None

    @property
    def label_HW(self) -> NDArray[np.int64] | None:
        """Return the true class of every pixel; None if it is not known, or if the image has one."""
        return None if isinstance(self.label, str) else self.label

    def __str__(self) -> str:
        truth = "" if self.class_name is None else f" (true label: {self.class_name})"
        return f"{self.model}; {self.image}{truth}"


@dataclass(frozen=True)
class Explanation:
    """The files of an explanation, and its data for comparisons."""

    subject: Subject
    files: tuple[Path, ...]
    image_HWC: NDArray[np.float64]  #: in [0, 1]
    rollouts: Mapping[str, NDArray[np.float64]]  #: token to its rolled-out attention over the grid of patches
    depth: int  #: number of blocks that they are rolled out over
    predictions: tuple[tuple[str, float], ...]  #: label and probability, best first; empty for an untrained head
    is_right: bool | None  #: whether the first of them is true; None if that is not known, or each pixel has a class
    labels: tuple[str, ...]  #: names of the classes; empty if they are numbers
    predicted_HW: NDArray[np.int64] | None  #: class of every pixel; None unless the model segments

    @property
    def answer(self) -> tuple[str, float | None]:
        """Return the predicted class and its probability, or of a segmentation the share of right pixels, as text."""
        if self.predicted_HW is not None:
            share = pictures.share_right(self.predicted_HW, self.subject.label_HW)
            return "a class for each pixel" if share is None else f"{pictures.percent(share)} of the pixels right", None
        return self.predictions[0] if self.predictions else ("", None)

    @property
    def sentence(self) -> str:
        """Return the answer in words, such as ``predicts 3 (97.2 %)``; empty if there is none."""
        label, share = self.answer
        return label if share is None else f"predicts {label} ({pictures.percent(share)})"


def explain(
    model: ViT,
    x_BCHW: Tensor,
    image_HWC: Tensor,
    labels: tuple[str, ...],
    out: Path,
    subject: Subject,
    *,
    head: Head = "trained",
) -> Explanation:
    """Write pictures (PNG) and numbers (CSV) about one image into ``out``.

    Args:
        model: a trained ViT.
        x_BCHW: the image as the model reads it, B = 1.
        image_HWC: the same image for display, in [0, 1].
        labels: names of the classes; numbers if empty.
        out: a folder; created if it does not exist.
        subject: written under every picture.
        head: ``untrained`` if the model's head was not trained; its predictions are then not shown.
    """
    captured = capture(model, x_BCHW)
    geometry, logits_BC = captured.geometry, captured.logits_by_head[""]
    figures: dict[str, Figure] = {}
    tables: dict[str, Table] = {}
    top: tuple[tuple[str, float], ...] = ()
    is_right: bool | None = None
    if head != "untrained":
        table = tables["predictions"] = _prediction_table(logits_BC, labels, subject.class_name, head)
        top = tuple(zip(table["label"], table["probability"], strict=True))[:TOP]
        is_right = table["true"][0] if "true" in table else None
    image = image_HWC.double().numpy()

    rollouts: dict[str, NDArray[np.float64]] = {}
    rolled_BTT = measures.rollout(captured.maps_LBHTT)
    reads = model.head.reads
    by_block = [measures.to_patches(maps_BHTT[0].double(), geometry, reads) for maps_BHTT in captured.maps_LBHTT]
    for token, map_BYX in measures.to_patches(rolled_BTT, geometry, reads).items():
        heat_YX = rollouts[token] = map_BYX[0].numpy()
        figures[f"rollout_{token}"] = pictures.attention_overlay(
            image, heat_YX, title=f"attention rollout, {token_title(token)}", predictions=top, truth=subject.class_name
        )
        tables[f"rollout_{token}"] = _grid_table(heat_YX)
        figures[f"heads_{token}"] = pictures.head_maps(
            [maps[token].numpy() for maps in by_block], query=token_title(token)
        )

    distance_LH = torch.stack([measures.attention_distance(maps, geometry)[0] for maps in captured.maps_LBHTT])
    largest = float(measures.patch_distances(geometry).max())
    figures["distance"] = pictures.distances(distance_LH.numpy(), largest=largest)
    blocks, heads = np.indices(distance_LH.shape).reshape(2, -1) + 1
    tables["distance"] = {"block": blocks, "head": heads, "distance_px": distance_LH.flatten().numpy()}

    norms = [measures.token_norms(tokens_BTD, geometry) for tokens_BTD in captured.tokens_LBTD]
    by_name = dict(zip(measures.Norms._fields, zip(*norms, strict=True), strict=True))
    tables["norms"] = {"depth": range(len(norms)), **by_name}
    figures["norms"] = pictures.norms(np.array(by_name["ratio"]))
    _add_positions(model, figures, tables)
    predicted_HW = None
    if head == "trained" and logits_BC.ndim == 4:
        predicted_HW = logits_BC[0].argmax(0).numpy()
        figures["labels"] = pictures.label_maps(image, {"prediction": predicted_HW}, labels, subject.label_HW)
        tables["labels"] = _grid_table(predicted_HW)
    files = _write_files(out, figures, tables, str(subject))
    depth = len(captured.maps_LBHTT)
    return Explanation(subject, tuple(files), image, rollouts, depth, top, is_right, labels, predicted_HW)


def compare(explanations: Mapping[str, Explanation], study: str, out: Path) -> list[Path]:
    """Write pictures of several models and the same image, side by side.

    There is one for each token, of its rolled-out attention, and one of the predicted labels of the pixels.

    Args:
        explanations: name of a model, such as its arm and seed, to its explanation; all of one image.
        study: name of the study, written under every picture.
        out: a folder; created if it does not exist.

    Returns:
        The files written; what fewer than two of the models have is left out.
    """
    first = next(iter(explanations.values()))
    figures: dict[str, Figure] = {}
    for token in dict.fromkeys(token for explanation in explanations.values() for token in explanation.rollouts):
        models = {
            name: pictures.Panel(each.image_HWC, each.rollouts[token], each.sentence, each.is_right is False)
            for name, each in explanations.items()
            if token in each.rollouts
        }
        if len(models) > 1:
            figures[f"side_by_side_{token}"] = pictures.side_by_side(
                models, title=f"attention rollout, {token_title(token)}", truth=first.subject.class_name
            )
    predicted = {name: each.predicted_HW for name, each in explanations.items() if each.predicted_HW is not None}
    if len(predicted) > 1:
        segmenting = next(each for each in explanations.values() if each.predicted_HW is not None)
        image_HWC, labels, truth_HW = segmenting.image_HWC, segmenting.labels, segmenting.subject.label_HW
        figures["side_by_side_labels"] = pictures.label_maps(image_HWC, predicted, labels, truth_HW)
    return _write_files(out, figures, {}, str(replace(first.subject, model=f"study {study}")))


def token_title(name: str) -> str:
    """Return the name of a token of a rollout in words."""
    return "mean over patches" if name == "mean" else f"{name} token"


def _add_positions(model: ViT, figures: dict[str, Figure], tables: dict[str, Table]) -> None:
    """Add the figure and the table of positions, if the model has some that are added to the tokens."""
    geometry = model.geometry
    rows = [part.rows(0) for part in encodings_by_prefix(model.position).values() if isinstance(part, Additive)]
    if rows:
        rows_ND = torch.stack([rows_TD[-geometry.patches :] for rows_TD in rows]).sum(0)
        step = -(-max(geometry.grid) // GRIDS)  # a grid of 32 by 32 would have a thousand pictures
        similarity = measures.position_similarity(rows_ND, geometry)[::step, ::step]
        figures["positions"] = pictures.position_grids(similarity.numpy())
        tables["positions"] = _grid_table(similarity.flatten(2).flatten(0, 1).numpy())


def _prediction_table(logits_BC: Tensor, labels: tuple[str, ...], truth: str | None, head: Head) -> Table:
    """Return the classes, the most probable first; of a segmentation, by their mean probability over the pixels."""
    score_C = logits_BC[0].double()
    share_C = (score_C.sigmoid() if head == "multilabel" else score_C.softmax(0)).reshape(len(score_C), -1).mean(1)
    order = share_C.argsort(descending=True).tolist()
    names = [labels[index] if labels else str(index) for index in order]
    table: dict[str, Any] = {"class": order, "label": names, "probability": share_C[order].tolist()}
    if truth is not None:
        table["true"] = [name == truth or (head == "multilabel" and name in truth.split(", ")) for name in names]
    return table


def _grid_table(values_YX: NDArray[Any]) -> Table:
    return {f"column {index}": column.astype(float) for index, column in enumerate(values_YX.T)}


def _write_files(out: Path, figures: Mapping[str, Figure], tables: Mapping[str, Table], caption: str) -> list[Path]:
    import pandas as pd

    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        pictures.add_caption(figure, caption)
        figure.savefig(out / f"{name}.png", dpi=150)
    for name, table in tables.items():
        pd.DataFrame(table).to_csv(out / f"{name}.csv", index=False)
    return [*(out / f"{name}.png" for name in figures), *(out / f"{name}.csv" for name in tables)]
