"""Models of timm as arms, with timm's weights by name.  timm is imported when a study names one of its models.

B images, C channels, H and W pixels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from vitlab.plugin import DataInfo, Logits, Model, OptionError, State, WeightsError, nearest, seeded, torchvision

Scalar = bool | int | float | str
Setting = Scalar | list[Scalar]
"""Values of a timm model's arguments in YAML."""

FROM_DATA = ("num_classes", "in_chans", "img_size")
NOT_OPTIONS = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_strict",
    "checkpoint_path",
    "cache_dir",
    "features_only",
    "out_indices",
    "scriptable",
    "exportable",
    "no_jit",
    "device",
    "dtype",
)
"""Arguments of ``timm.create_model`` that are no property of a model."""

DEFAULT = "vit_tiny_patch16_224"
NET = "net."


class Timm(Model):
    """A model of timm, built by timm for the images and classes of the data.

    Its canonical checkpoint has timm's names, so weights can be exchanged with ``vit`` where both are the same network.
    Its dropout draws from torch's generator, so replicates are trained one by one.

    Reference: R. Wightman, PyTorch Image Models, doi:10.5281/zenodo.4414861; each model names its own.

    Args:
        data: facts of the data set.
        name: such as ``resnet26d`` or ``vit_small_patch16_dinov3``; ``timm.list_models()`` has all.
        options: further arguments of the model, such as ``{drop_path_rate: 0.1}``.
        weights: timm's tag of published weights to start from, such as ``augreg_in21k_ft_in1k``; timm writes name
            and tag as ``vit_tiny_patch16_224.augreg_in21k_ft_in1k``.  They are downloaded to timm's cache when
            the trial begins.  timm adapts positions and the first layer to other sizes and channels; the classifier is
            new unless the number of classes is the same.

    Raises:
        OptionError: if timm does not have the name, the tag or an option, or if :meth:`incompatibility` has a reason.
    """

    def __init__(
        self,
        data: DataInfo,
        *,
        name: str = DEFAULT,
        options: Mapping[str, Setting] = {},
        weights: Annotated[str, Field(min_length=1)] | None = None,
    ) -> None:
        super().__init__()
        self.complete({"name": name, "options": options, "weights": weights})
        if reason := self.incompatibility(data, {"name": name, "options": options}):
            raise OptionError([((), reason)])
        self._arguments = {"model_name": name, **_arguments(name, data, options)}
        self._weights = weights
        self.net: Any = _timm().create_model(**self._arguments)
        self._layers = _layers(self.net)

    @classmethod
    def complete(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options unchanged after checking the names in them against timm."""
        name = options.get("name", DEFAULT)
        settings, tag = options.get("options") or {}, options.get("weights")
        if not isinstance(name, str) or not isinstance(settings, Mapping):
            return dict(options)  # the signature refuses these types
        timm = _timm()
        bare, _, dotted = name.partition(".")
        if not timm.is_model(bare):
            raise OptionError([(("name",), f"timm has no model called '{bare}'.{nearest(bare, timm.list_models())}")])
        if dotted:
            raise OptionError(
                [(("name",), f"the part after the dot names weights; write name: {bare} and weights: {dotted}")]
            )
        if tag is not None and tag not in (tags := _tags(name)):
            raise OptionError(
                [(("weights",), f"timm has no weights '{tag}' of {name}. It has: {', '.join(tags) or 'none'}.")]
            )
        for key in settings:
            if key in FROM_DATA:
                raise OptionError([(("options", key), f"{key} follows from the data; set data.size or data.channels")])
            if key in NOT_OPTIONS:
                raise OptionError([(("options", key), f"{key} is not an option of a model; remove it")])
        if reason := _refused_options(name, _text(settings)):
            raise OptionError([(("options",), f"timm's {name} refuses these options: {reason}")])
        return dict(options)

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Mapping[str, Any]) -> str | None:
        """Return why timm's model does not suit the data, or None."""
        name = options.get("name", DEFAULT)
        if data.task != "classification":
            return f"timm's {name} has one prediction per image, and the task is {data.task}"
        return _incompatibility(name, _text(options.get("options") or {}), data)

    @property
    def vmap_safe(self) -> bool:
        """Return False: dropout and drop-path draw from torch's generator, and batch norm updates itself in place."""
        return False

    @property
    def head(self) -> nn.Module | None:
        """The classifier, or None if the model does not have exactly one."""
        classifier = self.net.get_classifier() if hasattr(self.net, "get_classifier") else None
        return classifier if isinstance(classifier, nn.Module) else None

    def forward(self, x_BCHW: Tensor) -> Logits:
        """Return the logits of a batch of images."""
        return Logits(self.net(x_BCHW))

    def train(self, mode: bool = True) -> Self:
        """Set the mode as torch does, but keep frozen batch norms in evaluation mode."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d) and module.affine and not module.weight.requires_grad:
                module.eval()
        return self

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set the weights to timm's initial values under this seed, or to the published weights.

        Raises:
            WeightsError: if timm cannot load the published weights.
        """
        arguments = dict(self._arguments)
        if self._weights is not None:
            arguments |= {"model_name": f"{arguments['model_name']}.{self._weights}", "pretrained": True}
        with seeded(seed, "timm"), torch.device("cpu"):
            try:
                fresh = _timm().create_model(**arguments)
            except (OSError, RuntimeError, ValueError) as error:
                if self._weights is None:
                    raise
                first = " ".join(str(error).split())[:300]
                raise WeightsError(f"timm's weights {arguments['model_name']} could not be loaded: {first}") from error
        self.net.load_state_dict(fresh.state_dict())

    def no_weight_decay(self) -> set[str]:
        """Return the names that timm's model exempts from weight decay."""
        exempt: Any = self.net.no_weight_decay() if hasattr(self.net, "no_weight_decay") else ()
        return super().no_weight_decay() | {NET + name for name, _ in self.net.named_parameters() if name in exempt}

    def layer_of(self, name: str) -> int:
        """Return timm's layer of a parameter; a buffer has the layer of the parameters beside it."""
        path = name.removeprefix(NET)
        while path not in self._layers and path:
            path = path.rpartition(".")[0]
        return self._layers.get(path, 0)

    def to_canonical(self, state: State) -> dict[str, Tensor]:
        """Return the weights under timm's names."""
        return {name.removeprefix(NET): value for name, value in state.items()}

    def from_canonical(self, state: State) -> dict[str, Tensor]:
        """Return the weights under this model's names."""
        return {NET + name: value for name, value in state.items()}


@cache
def _timm() -> Any:
    torchvision()  # timm imports it, and its import may need a workaround
    import timm

    return timm


@cache
def _tags(name: str) -> list[str]:
    """Return the tags of timm's published weights of a model."""
    return [full.partition(".")[2] for full in _timm().list_models(f"{name}.*", pretrained=True)]


def _text(options: Mapping[str, Any]) -> str:
    """Return the options as text that a cache can hash."""
    return json.dumps(dict(options), sort_keys=True, default=str)


def _arguments(name: str, data: DataInfo, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for timm's constructor; networks of a fixed image size get the size of the data."""
    cfg = _timm().get_pretrained_cfg(name)
    size = {"img_size": data.image} if cfg is not None and cfg.fixed_input_size else {}
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return {"num_classes": data.classes, "in_chans": data.channels, **size, **settings}


@cache
def _refused_options(name: str, options: str) -> str | None:
    """Return why a model refuses these arguments for any data, or None."""
    try:
        with torch.device("meta"):
            _timm().create_model(name, **json.loads(options))
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            return str(error).rpartition("() ")[2]
    except Exception:  # may depend on sizes: see _incompatibility
        return None
    return None


@cache
def _incompatibility(name: str, options: str, data: DataInfo) -> str | None:
    """Return timm's error when the model is built and run on the meta device, or None."""
    height, width = data.image
    prefix = f"timm's {name} cannot be used for {height} by {width} pixels and {data.channels} channels"
    try:
        with torch.device("meta"), torch.no_grad():
            net = _timm().create_model(name, **_arguments(name, data, json.loads(options))).eval()
            out = net(torch.zeros(2, data.channels, height, width))
    except Exception as error:  # timm raises many types for sizes that do not fit
        return f"{prefix}: {' '.join(str(error).split()) or type(error).__name__}"
    if not isinstance(out, Tensor) or tuple(out.shape) != (2, data.classes):
        return f"{prefix}: it does not give {data.classes} logits per image"
    patch = getattr(net, "patch_embed", None)
    if isinstance(patch, _timm().layers.PatchEmbed) and not patch.dynamic_img_pad:
        rows, columns = patch.patch_size
        if height % rows or width % columns:
            return f"{prefix}: its patches of {rows} by {columns} do not divide them, and timm would drop the rest"
    return None


def _layers(net: Any) -> dict[str, int]:
    """Return the layer of each parameter, and of each module whose parameters are in one layer.

    Layers are timm's groups; a model without groups has two, the body and the classifier.
    """
    if hasattr(net, "group_matcher"):
        groups = _timm().models.group_parameters(net, net.group_matcher(coarse=False), reverse=True)
    else:
        classifier = net.pretrained_cfg["classifier"]
        heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
        groups = {name: int(name.startswith(heads)) for name, _ in net.named_parameters()}
    layers: dict[str, int] = dict(groups)
    for name, layer in groups.items():
        path = name.rpartition(".")[0]
        while path and path not in layers:
            layers[path] = layer
            path = path.rpartition(".")[0]
    return layers
