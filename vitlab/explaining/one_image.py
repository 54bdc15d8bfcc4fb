"""Explanation of one image: all analyses of a trained model, as pictures and tables.

Every model with a trained head has a map of a class; maps of attention, distances, norms and positions are of a ViT.

B images (1 here), L blocks, H heads, T tokens of which P stand before the patches, N patches, C classes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from vitlab.components.position import encodings_by_prefix
from vitlab.components.position.additive import Additive
from vitlab.errors import ByName, UserError
from vitlab.explaining import measures, pictures
from vitlab.explaining.attribution import integrated_gradients, patch_grid
from vitlab.explaining.capture import capture
from vitlab.explaining.pictures import RANDOM, Array, Kind, Map, Scale
from vitlab.models.contract import Model, evaluation_mode
from vitlab.models.vit import ViT

NODES = (32, 128, 512)  #: gradients of an attribution; more are taken if the sum of the patches is off with fewer
CHECKED = 8  #: fewest patches of a check: of fewer, random choices would often be the map's own, as 1 of 4 patches
GRIDS = 16  #: position grids along a side of the figure; larger grids are subsampled
Table = Mapping[str, Any]
"""Columns by name."""

Head = Literal["trained", "multilabel", "untrained"]
"""How a model's head was trained: on classes, on any number of classes an image, or, without labels, not at all."""


@dataclass(frozen=True)
class Subject:
    """The model and the image of an explanation, as its pictures name them."""

    model: str  #: such as "study first, arm baseline, seed 0"
    image: str  #: such as "test image 3"
    class_name: str | None = None  #: the true class; None if it is not known, or if every pixel has its own
    label_HW: NDArray[np.int64] | None = None  #: the true class of every pixel; None if it is not known, or of none

    def __str__(self) -> str:
        truth = "" if self.class_name is None else f" (true label: {self.class_name})"
        return f"{self.model}; {self.image}{truth}"


@dataclass(frozen=True, repr=False)
class Explanation:
    """What was computed of a model and an image."""

    subject: Subject
    image_HWC: Array  #: in [0, 1]
    maps: Mapping[str, Map]  #: by the name of their files
    no_attention: str  #: the reason why there are no maps of attention; empty if there are
    heads: Mapping[str, Array]  #: token to its attention to patches, (L, H, rows, columns)
    distance_LH: Array  #: empty without maps of attention
    uniform_distance: float  #: of attention to all tokens alike
    norms: Sequence[measures.Norms]  #: by depth; empty for a model without tokens
    similarity_YXYX: Array | None  #: of positions; None if none are added to tokens
    head: Head  #: how the model's head was trained
    predictions: Table | None  #: every class, best first; None for an untrained head
    labels: tuple[str, ...]  #: names of the classes, which may be numbers
    predicted_HW: NDArray[np.int64] | None  #: class of every pixel; None unless the model segments
    files: Sequence[Path] = ()  #: that :func:`write_explanation` has written

    def __repr__(self) -> str:
        return f"<Explanation {self.subject}: {self.sentence}; maps {', '.join(self.maps)}>"

    def _repr_png_(self) -> bytes:
        """Return the image and its maps beside each other, for a notebook."""
        is_wrong = self.is_right is False
        panels = {
            name: pictures.Panel(self.image_HWC, each, self.sentence, is_wrong) for name, each in self.maps.items()
        }
        with BytesIO() as file:
            pictures.draw_models_side_by_side(panels, truth=self.subject.class_name).savefig(file, dpi=90)
            return file.getvalue()

    def overlay(self, name: str) -> Image.Image:
        """Return a map over the image, such as ``rollout_class`` or ``attribution``."""
        return pictures.overlay(self.image_HWC, self.maps[name])

    @property
    def ranking(self) -> list[tuple[str, float]]:
        """The classes with their probabilities, best first; empty for an untrained head."""
        table = self.predictions
        return [] if table is None else list(zip(table["label"], table["probability"], strict=True))

    @property
    def is_right(self) -> bool | None:
        """Whether the predicted classes are the true ones; None if that is not known, or each pixel has a class."""
        table = self.predictions
        return table["true"] == table["predicted"] if table and "true" in table else None

    @property
    def prediction_and_probability(self) -> tuple[str, float | None]:
        """Return what is predicted as text, and the probability of a single class.

        It is a class, any number of classes, or of a segmentation the share of right pixels.
        """
        if self.predicted_HW is not None:
            return pictures.pixels_right(self.predicted_HW, self.subject.label_HW) or "a class for each pixel", None
        if self.predictions is None:
            return "", None
        classes = self.ranking[: sum(self.predictions["predicted"])]
        return (", ".join(name for name, _ in classes) or "none"), classes[0][1] if len(classes) == 1 else None

    @property
    def chance_if_close(self) -> float | None:
        """The probability of a class by chance, if the odds of the predicted one are less than twice its odds."""
        classes, share = len(self.labels), self.prediction_and_probability[1]
        if share is None or classes < 2 or self.head == "multilabel":
            return None
        return 1 / classes if share * (classes - 1) < 2 * (1 - share) else None

    @property
    def sentence(self) -> str:
        """Return the answer in words, such as ``predicts 3 (97.2 %)``; empty if there is none."""
        label, share = self.prediction_and_probability
        if self.predicted_HW is not None or not label:
            return label
        if share is None:
            return f"predicts {label}"
        true = dict(self.ranking).get(self.subject.class_name or "") if self.is_right is False else None
        rest = "" if true is None else f", not {self.subject.class_name} ({pictures.percent(true)})"
        if self.chance_if_close is not None:
            rest += f"; chance is {pictures.percent(self.chance_if_close)}, so its maps say little"
        return f"predicts {label} ({pictures.percent(share)}){rest}"


def explain(
    model: Model,
    x_BCHW: Tensor,
    image_HWC: Tensor,
    labels: tuple[str, ...],
    subject: Subject,
    *,
    head: Head = "trained",
    target: int | None = None,
) -> Explanation:
    """Compute everything that is drawn of a model and an image.

    Args:
        model: a trained model.
        x_BCHW: the image as the model reads it, B = 1.
        image_HWC: the same image for display, in [0, 1].
        labels: names of the classes; numbers if empty.
        subject: written under every picture.
        head: ``untrained`` if the model's head was not trained; its predictions are then not shown.
        target: the class whose logit is attributed to patches; by default the most probable one.

    Raises:
        UserError: if there is no map of the model: it has no attention, and its head was not trained.
    """
    captured = capture(model, x_BCHW)
    logits_BC = captured.logits_BC
    labels = labels or tuple(map(str, range(logits_BC.shape[1])))
    maps, heads, distance_LH, uniform, norms = dict[str, Map](), dict[str, Array](), np.empty((0, 0)), 0.0, []
    if isinstance(model, ViT):
        geometry, reads, all_maps = model.geometry, model.head.reads, captured.maps_LBHTT
        norms = [measures.token_norm_statistics(tokens_BTD, geometry) for tokens_BTD in captured.tokens_LBTD]
        uniform = float(measures.patch_distances(geometry).mean()) * geometry.patches / geometry.tokens
        if all_maps:
            by_block = [measures.attention_to_patch_maps(each[0].double(), geometry, reads) for each in all_maps]
            heads = {token: np.stack([of_block[token].numpy() for of_block in by_block]) for token in by_block[0]}
            distance_LH = np.stack([measures.attention_distance(each, geometry)[0].numpy() for each in all_maps])
            rolled = measures.attention_to_patch_maps(measures.rollout(all_maps), geometry, reads)
            for token, map_BYX in rolled.items():
                values_YX, title = map_BYX[0].numpy(), f"attention rollout, {token_title(token)}"
                numbers = {"largest_share": float(values_YX.max()), "mean_share": float(values_YX.mean())}
                maps[f"rollout_{token}"] = Map.of("rollout", title, values_YX, numbers)
    table = None
    if head != "untrained":
        probability_C = _probabilities(logits_BC, head)[0]
        table = _prediction_table(probability_C, labels, subject.class_name, head)
        label = table["class"][0] if target is None else target
        for nodes in NODES:
            part_YX, difference = integrated_gradients(model, x_BCHW, label, nodes)
            numbers = {"sum": float(part_YX.sum()), "logit_difference": difference}
            if not pictures.sums_differ(numbers):
                break
        title = f"patches for (red) and against (blue) class {labels[label]}"
        maps["attribution"] = Map.of("attribution", title, part_YX.numpy(), numbers)
        whole = {"class": labels[label], "probability": float(probability_C[label])}
        maps = _add_occlusion_checks(maps, model, x_BCHW, label, whole, head)
    if not maps:
        raise UserError(f"there is nothing to draw: {captured.no_maps}, and its head was trained without labels")
    return Explanation(
        subject,
        image_HWC.double().numpy(),
        ByName(maps),
        captured.no_maps,
        ByName(heads),
        distance_LH,
        uniform,
        norms,
        _position_similarity(model) if isinstance(model, ViT) else None,
        head,
        table,
        labels,
        logits_BC[0].argmax(0).numpy() if head == "trained" and logits_BC.ndim == 4 else None,
    )


def common_scales(explanations: Iterable[Explanation]) -> dict[Kind, Scale]:
    """Return one scale for all numbers of each kind."""
    arrays = defaultdict[Kind, list[Array]](list)
    for explanation in explanations:
        arrays["heads"] += explanation.heads.values()
        arrays["distance"] += [explanation.distance_LH, np.array([1.5 * explanation.uniform_distance])]
        arrays["norms"].append(np.array([norms.ratio for norms in explanation.norms]))
        for each in explanation.maps.values():
            arrays[each.kind].append(each.values_YX)
    return {kind: Scale.of(kind, of_kind) for kind, of_kind in arrays.items()}


def write_explanation(explanation: Explanation, out: Path, scales: Mapping[Kind, Scale] = {}) -> Explanation:
    """Write pictures (PNG) and numbers (CSV) into a folder, and return the explanation with its files and scales.

    Maps whose kind has no scale keep their own.
    """
    maps = {name: each._replace(scale=scales.get(each.kind, each.scale)) for name, each in explanation.maps.items()}
    axes = {**common_scales([explanation]), **scales}
    figures: dict[str, Figure] = {}
    tables: dict[str, Table] = {name: _grid_table(each.values_YX) for name, each in maps.items()}
    for token, maps_LHYX in explanation.heads.items():
        figures[f"heads_{token}"] = pictures.draw_head_maps(maps_LHYX, axes["heads"], query=token_title(token))
    if (distance_LH := explanation.distance_LH).size:
        uniform = explanation.uniform_distance
        figures["distance"] = pictures.draw_distances(distance_LH, axes["distance"], uniform=uniform)
        blocks, heads = np.indices(distance_LH.shape).reshape(2, -1) + 1
        tables["distance"] = {"block": blocks, "head": heads, "distance_px": distance_LH.flatten()}
    if explanation.norms:
        by_name = dict(zip(measures.Norms._fields, np.transpose(explanation.norms), strict=True))
        tables["norms"] = {"depth": range(len(explanation.norms)), **by_name}
        figures["norms"] = pictures.draw_norm_ratios(by_name["ratio"], axes["norms"])
    if (similarity := explanation.similarity_YXYX) is not None:
        figures["positions"] = pictures.draw_position_grids(similarity)
        tables["positions"] = _grid_table(similarity.reshape(-1, similarity.shape[2] * similarity.shape[3]))
    if explanation.predictions is not None:
        tables["predictions"] = explanation.predictions
    if explanation.predicted_HW is not None:
        tables["labels"] = _grid_table(explanation.predicted_HW)
    return replace(
        explanation, maps=maps, files=_write_figures_and_tables(out, figures, tables, str(explanation.subject))
    )


def write_side_by_side(explanations: Mapping[str, Explanation], caption: str, out: Path) -> list[Path]:
    """Write pictures of models and the same image, side by side, and the numbers of their maps in one table.

    There is a picture of each map, and one of the labels of pixels.

    Args:
        explanations: name of a model, such as its arm and seed, to its explanation; all of one image.
        caption: written under every picture, before the image.
        out: a folder; created if it does not exist.

    Returns:
        The files written.
    """
    first = next(iter(explanations.values()))
    figures: dict[str, Figure] = {}
    for key in dict.fromkeys(key for explanation in explanations.values() for key in explanation.maps):
        models = {
            name: pictures.Panel(each.image_HWC, each.maps[key], each.sentence, each.is_right is False)
            for name, each in explanations.items()
            if key in each.maps
        }
        figures[key] = pictures.draw_models_side_by_side(models, truth=first.subject.class_name)
    predicted = {name: each.predicted_HW for name, each in explanations.items() if each.predicted_HW is not None}
    if predicted:
        truth_HW = first.subject.label_HW
        figures["labels"] = pictures.draw_label_maps(first.image_HWC, predicted, first.labels, truth_HW)
    numbers = [
        {"model": name, "map": key, **each.maps[key].numbers}
        for name, each in explanations.items()
        for key in each.maps
    ]
    return _write_figures_and_tables(out, figures, {"maps": numbers}, str(replace(first.subject, model=caption)))


def token_title(name: str) -> str:
    """Return the name of a token of a rollout in words."""
    return "mean over patches" if name == "mean" else f"{name} token"


def _position_similarity(model: ViT) -> Array | None:
    """Return the similarity of the positions that are added to the tokens; None if there are none."""
    geometry = model.geometry
    rows = [part.rows(0) for part in encodings_by_prefix(model.position).values() if isinstance(part, Additive)]
    if not rows:
        return None
    rows_ND = torch.stack([rows_TD[-geometry.patches :] for rows_TD in rows]).sum(0)
    step = -(-max(geometry.grid) // GRIDS)  # a grid of 32 by 32 would have a thousand pictures
    similarity: Array = measures.position_similarity(rows_ND, geometry)[::step, ::step].numpy()
    return similarity


def _add_occlusion_checks(
    maps: Mapping[str, Map], model: Model, x_BCHW: Tensor, label: int, unoccluded: Mapping[str, Any], head: Head
) -> dict[str, Map]:
    """Add to the numbers of maps the probability of a class without their largest patches, random ones, and all.

    ``unoccluded`` is of the image as it is.  If a map told nothing, its number would be below those of all ``RANDOM``
    choices once in ``RANDOM + 1`` images.  Of fewer than ``CHECKED`` patches only all are left out: a plain image.

    Patches are left out by the mean colour, which normalisation makes zeros.  Petsiuk, Das and Saenko 2018,
    arXiv:1806.07421, delete pixels one after another.
    """
    grid = patch_grid(model, x_BCHW)
    random = np.random.default_rng(0).random((RANDOM, *grid))
    values_SN = torch.from_numpy(np.stack([*(each.values_YX for each in maps.values()), *random])).flatten(1)
    patches = values_SN.shape[1]
    count = patches // 4 if patches >= CHECKED else 0
    kept_SN = torch.ones_like(values_SN, dtype=x_BCHW.dtype).scatter(1, values_SN.topk(count).indices, 0.0)
    kept_SCHW = interpolate(pad(kept_SN, (0, 0, 1, 0)).view(-1, 1, *grid), x_BCHW.shape[2:])  # the first has no patch
    with evaluation_mode(model), torch.no_grad():
        of_plain, *chances = _probabilities(model.logits_by_head(model(x_BCHW * kept_SCHW))[""], head)[
            :, label
        ].tolist()
    of_random = chances[-RANDOM:]
    return {
        name: each._replace(
            numbers={
                **each.numbers,
                **unoccluded,
                "plain_probability": of_plain,
                "patches_removed": count,
                "without_largest": chance,
                "without_random_mean": sum(of_random) / RANDOM,
                "without_random_lowest": min(of_random),
                "without_random_highest": max(of_random),
                "random_above": sum(other > chance for other in of_random),
            }
        )
        for (name, each), chance in zip(maps.items(), chances, strict=False)
    }


def _probabilities(logits_BC: Tensor, head: Head) -> Tensor:
    """Return probabilities, float64 (B, C), of a segmentation the means over the pixels."""
    score_BC = logits_BC.detach().double()
    share_BC = score_BC.sigmoid() if head == "multilabel" else score_BC.softmax(1)
    return share_BC.reshape(*share_BC.shape[:2], -1).mean(2)


def _prediction_table(share_C: Tensor, labels: tuple[str, ...], truth: str | None, head: Head) -> Table:
    """Return the classes with their probabilities, the most probable first."""
    shares, order = (each.tolist() for each in share_C.sort(descending=True))
    names = [labels[index] for index in order]
    predicted = [share >= 0.5 if head == "multilabel" else place == 0 for place, share in enumerate(shares)]
    table: dict[str, Any] = {"class": order, "label": names, "probability": shares, "predicted": predicted}
    if truth is not None:
        table["true"] = [
            # Two classes may have one name, of which the more probable one counts.
            name in truth.split(", ") if head == "multilabel" else name == truth and place == names.index(name)
            for place, name in enumerate(names)
        ]
    return table


def _grid_table(values_YX: NDArray[Any]) -> Table:
    return {f"column {index}": column for index, column in enumerate(values_YX.T)}


def _write_figures_and_tables(
    out: Path, figures: Mapping[str, Figure], tables: Mapping[str, Table | Sequence[Table]], caption: str
) -> list[Path]:
    import pandas as pd

    out.mkdir(parents=True, exist_ok=True)
    files = list[Path]()
    for name, figure in figures.items():
        pictures.add_caption(figure, caption)
        files.append(out / f"{name}.png")
        figure.savefig(files[-1], dpi=120)
    for name, table in tables.items():
        files.append(out / f"{name}.csv")
        pd.DataFrame(table).to_csv(files[-1], index=False)
    return files
