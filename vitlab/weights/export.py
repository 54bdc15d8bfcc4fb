"""Export of a model to ONNX or ``torch.export``, with a comparison of its outputs.

B images, C channels, H and W pixels, K classes.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitlab.errors import WeightsError, first_sentence
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.weights.architecture import Values

ExportFormat = Literal["onnx", "torch"]
SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}
TOLERANCE = 1e-4
"""Largest difference of the logits, relative to the largest logit: kernels add in other orders, in float32."""
BATCHES = (1, 3)  #: sizes for which outputs are compared


class FromPixels(nn.Module):
    """A model with the normalisation of its images in front: pixels in [0, 1] (B, C, H, W) to logits (B, K)."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, mean: Values, std: Values) -> None:
        super().__init__()
        self.model = model
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        return self.model.logits_by_head(self.model((pixels_BCHW - self.mean) / self.std))[""]


def export_and_verify(model: Model, info: DataInfo, mean: Values, std: Values, file: Path, form: ExportFormat) -> float:
    """Write a model to a file that takes pixels in [0, 1] in batches of any size, and compare its outputs.

    Mean and deviation are of the pixels, per channel; the model's parameters become float32.

    Returns:
        The largest difference between the logits of the file and the model, relative to the largest logit.

    Raises:
        WeightsError: if the model cannot be exported, ONNX is not installed, or the file computes something else; then
            nothing is written, and an earlier file stays.
    """
    module = FromPixels(model.float(), mean, std).eval()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.rand(size, info.channels, *info.image, generator=generator) for size in BATCHES]
    shapes = {"pixels_BCHW": {0: torch.export.Dim("batch")}}
    file.parent.mkdir(parents=True, exist_ok=True)
    # A folder, since a large ONNX file names a second one beside it.
    with TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
        new = Path(folder, file.name)
        try:
            with torch.no_grad():  # with gradients, ONNX's exporter refuses the strides of some attentions
                # The example has several images, so that a batch of one is no special case.
                program = torch.export.export(module, (batches[-1],), dynamic_shapes=shapes, strict=False)
                run = _export_and_load_onnx(program, new) if form == "onnx" else _export_torch(program, new)
                pairs = [(module(x_BCHW), run(x_BCHW)) for x_BCHW in batches]
        except WeightsError:
            raise
        except Exception as error:  # exporters raise anything for what they do not support
            reason = f"{type(error).__name__}: {first_sentence(error)}"
            raise WeightsError(f"this model cannot be exported to {form}: {reason}") from None
        smallest = torch.finfo(torch.float32).tiny  # a new head of zeros has no largest logit
        difference = max(float((own - other).abs().max() / own.abs().max().clamp(smallest)) for own, other in pairs)
        if not difference <= TOLERANCE:
            raise WeightsError(
                f"the exported file computes other logits than the model, off by {difference:.1e} of the largest; it "
                "was deleted"
            )
        for part in Path(folder).iterdir():
            os.replace(part, file.with_name(part.name))
    return difference


def _export_torch(program: Any, file: Path) -> Callable[[Tensor], Tensor]:
    torch.export.save(program, file)
    return torch.export.load(file).module()


def _export_and_load_onnx(program: Any, file: Path) -> Callable[[Tensor], Tensor]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # of torch's exporter
    except ImportError as error:
        raise WeightsError(f"export to ONNX needs {error.name}: pip install 'vitlab[onnx]'") from None
    with warnings.catch_warnings():
        # torch's exporter copies its own trees in a way that torch advises against.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        exported = torch.onnx.export(program, input_names=["pixels"], output_names=["logits"], verbose=False)
    assert exported is not None
    exported.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda x_BCHW: torch.from_numpy(session.run(None, {"pixels": x_BCHW.numpy()})[0])
