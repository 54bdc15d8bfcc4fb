"""Attribution of the logit of a class to patches, by integrated gradients.

Sundararajan, Taly and Yan 2017, arXiv:1703.01365.  The values depend on the function that a model computes, not on its
attention weights, so they exist for every model, and can be compared between attentions, heads and positions.

B images (1 in arguments), C channels, H rows and W columns of pixels, Y and X rows and columns of patches, K classes.
"""

import numpy as np
import torch
from torch import Tensor

from vitlab.models.contract import Model, evaluation_mode

BATCH = 8  #: images of these at once
PARTS = 14  #: most patches along a side of a model without patches: those of a ViT/16 at 224 pixels


def patch_grid(model: Model, x_BCHW: Tensor) -> tuple[int, int]:
    """Return rows and columns of a model's patches, or of the most parts, up to ``PARTS``, that divide a side."""
    if model.geometry is not None:
        return model.geometry.grid
    rows, columns = (max(n for n in range(1, PARTS + 1) if side % n == 0) for side in x_BCHW.shape[2:])
    return rows, columns


def integrated_gradients(model: Model, x_BCHW: Tensor, label: int, nodes: int) -> tuple[Tensor, float]:
    """Return what each patch adds to the logit of a class, from a plain image of the mean colour to this image.

    The gradient of the logit, at ``nodes`` images, is averaged over the straight line from the plain image, which
    normalisation makes zeros, to the image, multiplied by the image, and summed over the pixels of each patch.  The
    logit of a segmentation is the mean over its pixels.  The model runs in evaluation mode, in its own precision; its
    mode is restored.

    Returns:
        float64 (Y, X), and the image's logit minus the plain image's, the sum of the values if the logit is continuous
        between the two.
    """

    def logit(at_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = model.logits_by_head(model(at_BCHW))[""]
        return logits_BK[:, label].reshape(len(at_BCHW), -1).mean(1)

    # Places are between -1 and 1.
    places, weights = (torch.from_numpy(each).view(-1, 1, 1, 1) for each in np.polynomial.legendre.leggauss(nodes))
    gradient_CHW = torch.zeros_like(x_BCHW[0], dtype=torch.float64)
    with evaluation_mode(model), torch.enable_grad():
        for place_B, weight_B in zip(torch.split(places, BATCH), torch.split(weights, BATCH), strict=True):
            at_BCHW = (x_BCHW * ((place_B + 1) / 2).to(x_BCHW.dtype)).requires_grad_()
            (slope_BCHW,) = torch.autograd.grad(logit(at_BCHW).sum(), at_BCHW, materialize_grads=True)
            gradient_CHW += (weight_B / 2 * slope_BCHW.double()).sum(0)
        of_image, of_plain = logit(torch.cat([x_BCHW, torch.zeros_like(x_BCHW)])).tolist()
    rows, columns = patch_grid(model, x_BCHW)
    part_HW = (gradient_CHW * x_BCHW[0].double()).sum(0)
    return part_HW.reshape(rows, part_HW.shape[0] // rows, columns, -1).sum((1, 3)), of_image - of_plain
