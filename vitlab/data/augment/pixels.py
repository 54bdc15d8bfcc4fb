"""Batched pixel operations with a separate strength for every image.

Images are uint8.  Results are truncated or rounded as in torchvision, so that equal strengths give equal pixels.

B images of a batch, C channels, H rows, W columns, O rows or columns of an output.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlab import noise
from vitlab.data.augment import Boxes

GREY = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue, with torchvision's digits."""

PICKING_DEVICES = ("cpu",)
"""Device types on which an operation is applied to its images only; on others it is applied to all, see apply_where."""


def grey(x_BCHW: Tensor) -> Tensor:
    """Return luma in every channel; images without three channels are returned unchanged."""
    if x_BCHW.shape[1] != 3:
        return x_BCHW
    red, green, blue = x_BCHW.unbind(1)
    luma_BHW = (GREY[0] * red + GREY[1] * green + GREY[2] * blue).to(x_BCHW.dtype)
    return luma_BHW[:, None].expand_as(x_BCHW)


def brightness(x_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """Scale brightness: 0 gives black, 1 the original image, more is brighter."""
    return _blend(x_BCHW, torch.zeros_like(x_BCHW), factor_B)


def contrast(x_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """Scale contrast: 0 gives the mean grey, 1 the original image."""
    return _blend(x_BCHW, grey(x_BCHW).float().mean((1, 2, 3), keepdim=True), factor_B)


def saturation(x_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """Scale saturation: 0 gives grey, 1 the original image; needs three channels, else nothing changes."""
    if x_BCHW.shape[1] != 3:
        return x_BCHW
    return _blend(x_BCHW, grey(x_BCHW), factor_B)


def sharpness(x_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """Scale sharpness: 0 gives a 3x3 smoothed image, 1 the original; the outermost pixels do not change."""
    if min(x_BCHW.shape[-2:]) <= 2:
        return x_BCHW
    kernel_33 = torch.ones(3, 3, device=x_BCHW.device)
    kernel_33[1, 1] = 5
    channels = x_BCHW.shape[1]
    smooth_BCHW = F.conv2d(x_BCHW.float(), (kernel_33 / 13).expand(channels, 1, 3, 3), groups=channels)
    blurred_BCHW = x_BCHW.clone()
    blurred_BCHW[..., 1:-1, 1:-1] = smooth_BCHW.round().to(torch.uint8)
    return _blend(x_BCHW, blurred_BCHW, factor_B)


def hue(x_BCHW: Tensor, shift_B: Tensor) -> Tensor:
    """Shift hue by a share of the colour circle, in [-0.5, 0.5]; needs three channels, else nothing changes."""
    if x_BCHW.shape[1] != 3:
        return x_BCHW
    pixel_BCHW = x_BCHW.float() / 255
    value_BHW, most_BHW = pixel_BCHW.max(1)
    chroma_BHW = value_BHW - pixel_BCHW.min(1).values
    red, green, blue = pixel_BCHW.unbind(1)
    safe_BHW = torch.where(chroma_BHW == 0, 1, chroma_BHW)
    sixth_BHW = torch.where(
        most_BHW == 0,
        (green - blue) / safe_BHW,
        torch.where(most_BHW == 1, 2 + (blue - red) / safe_BHW, 4 + (red - green) / safe_BHW),
    )
    sixth_BHW = sixth_BHW + 6 * shift_B[:, None, None]
    shift_C = torch.arange(5.0, 0.0, -2.0, device=x_BCHW.device)  # 5, 3, 1, without a copy from the host
    k_BCHW = (sixth_BHW[:, None] + shift_C[:, None, None]) % 6
    ramp_BCHW = torch.minimum(k_BCHW, 4 - k_BCHW).clamp(0, 1)
    out_BCHW = value_BHW[:, None] - chroma_BHW[:, None] * ramp_BCHW
    return (out_BCHW * (256 - 1e-3)).to(torch.uint8)


def solarize(x_BCHW: Tensor, threshold_B: Tensor) -> Tensor:
    """Invert pixels at or above the threshold."""
    return torch.where(x_BCHW >= threshold_B[:, None, None, None], 255 - x_BCHW, x_BCHW)


def posterize(x_BCHW: Tensor, bits_B: Tensor) -> Tensor:
    """Reduce pixels to their highest ``bits_B`` bits, 0 to 8."""
    bit_mask_B = (256 - 2 ** (8 - bits_B.int())).to(torch.uint8)
    return x_BCHW & bit_mask_B[:, None, None, None]


def autocontrast(x_BCHW: Tensor) -> Tensor:
    """Stretch each channel to the whole range; a constant channel does not change."""
    pixel_BCHW = x_BCHW.float()
    low_BC11, high_BC11 = pixel_BCHW.amin((2, 3), keepdim=True), pixel_BCHW.amax((2, 3), keepdim=True)
    flat_BC11 = low_BC11 == high_BC11
    scale_BC11 = 255 / torch.where(flat_BC11, 1, high_BC11 - low_BC11)
    out_BCHW = ((pixel_BCHW - low_BC11) * scale_BC11).clamp(0, 255).to(torch.uint8)
    return torch.where(flat_BC11, x_BCHW, out_BCHW)


def equalize(x_BCHW: Tensor) -> Tensor:
    """Equalise the histogram of each channel."""
    # Pillow's integer arithmetic: the last occupied level is not counted into the step.
    level_BCP = x_BCHW.flatten(2).long()
    count_BCL = torch.zeros(*level_BCP.shape[:2], 256, dtype=torch.int64, device=x_BCHW.device)
    count_BCL.scatter_add_(2, level_BCP, torch.ones_like(level_BCP))
    last_BC1 = count_BCL.gather(2, level_BCP.amax(2, keepdim=True))
    step_BC1 = (level_BCP.shape[2] - last_BC1) // 255
    safe_BC1 = step_BC1.clamp(min=1)
    map_BCL = ((count_BCL.cumsum(2) - count_BCL + safe_BC1 // 2) // safe_BC1).clamp(0, 255)
    out_BCHW = map_BCL.gather(2, level_BCP).view(x_BCHW.shape).to(torch.uint8)
    return torch.where((step_BC1 == 0)[..., None], x_BCHW, out_BCHW)


def blur(x_BCHW: Tensor, sigma_B: Tensor) -> Tensor:
    """Apply a Gaussian blur of ``sigma_B`` pixels, cut off at 6 pixels, with reflected borders."""
    batch, channels, height, width = x_BCHW.shape
    radius = min(6, height - 1, width - 1)
    distance_T = torch.arange(-radius, radius + 1, device=x_BCHW.device)
    kernel_BT = torch.softmax(-0.5 * (distance_T / sigma_B[:, None]) ** 2, 1)
    # Images are channels of one image here, because each has a kernel of its own.
    kernel_GT = kernel_BT.repeat_interleave(channels, 0)  # G: one group for each channel of each image
    x_1GHW = F.pad(x_BCHW.float().view(1, batch * channels, height, width), (radius,) * 4, mode="reflect")
    x_1GHW = F.conv2d(x_1GHW, kernel_GT[:, None, :, None], groups=batch * channels)
    x_1GHW = F.conv2d(x_1GHW, kernel_GT[:, None, None, :], groups=batch * channels)
    return _round_levels(x_1GHW.view(x_BCHW.shape))


def resized_crop(x_BCHW: Tensor, boxes: Boxes, kernel: Literal["bilinear", "bicubic"]) -> Tensor:
    """Crop a rectangle of each image and enlarge it to the size of the image.

    Computed as two products with matrices of interpolation weights.  Enlarging needs no antialiasing, so for
    ``bilinear`` Pillow and torch agree with it and without it; ``bicubic`` is the antialiased variant (a = -0.5).
    """
    height, width = x_BCHW.shape[-2:]
    row_BOH = _resize_weights(boxes.top_B, boxes.height_B, height, kernel)
    column_BOW = _resize_weights(boxes.left_B, boxes.width_B, width, kernel)
    out_BCHW = row_BOH[:, None] @ x_BCHW.to(row_BOH.dtype) @ column_BOW[:, None].mT
    return _round_levels(out_BCHW)


def affine(x_BCHW: Tensor, matrix_B23: Tensor) -> Tensor:
    """Apply an affine transform with nearest-neighbour sampling; pixels from outside are black.

    Each matrix maps output to input coordinates, (column, row) in pixels from the centre of the image.
    """
    grid_BHW2 = _sampling_grid(x_BCHW, matrix_B23)
    out_BCHW = F.grid_sample(x_BCHW.float(), grid_BHW2, mode="nearest", padding_mode="zeros", align_corners=False)
    return out_BCHW.to(torch.uint8)


def affine_smooth(x_BCHW: Tensor, matrix_B23: Tensor, fill: int) -> Tensor:
    """Apply an affine transform with bilinear sampling, and the level ``fill`` outside of the image."""
    grid_BHW2 = _sampling_grid(x_BCHW, matrix_B23)
    out_BCHW = F.grid_sample(x_BCHW.float(), grid_BHW2, mode="bilinear", padding_mode="border", align_corners=False)
    inside_BHW = ((grid_BHW2 >= -1) & (grid_BHW2 < 1)).all(3)
    return torch.where(inside_BHW[:, None], _round_levels(out_BCHW), fill)


def apply_where(x_BCHW: Tensor, mask_B: Tensor, change: Callable[..., Tensor], *amounts: Tensor) -> Tensor:
    """Apply ``change(images, *amounts)`` to the images where ``mask_B`` is true, each with its own amounts.

    On the CPU, the change is computed for these images only.  Elsewhere it is computed for all images, because the host
    would have to wait for the device to know which ones they are.
    """
    if x_BCHW.device.type not in PICKING_DEVICES:
        return torch.where(mask_B[:, None, None, None], change(x_BCHW, *amounts), x_BCHW)
    position_M = mask_B.nonzero()[:, 0]
    if not len(position_M):
        return x_BCHW
    out_MCHW = change(x_BCHW[position_M], *(amount_B[position_M] for amount_B in amounts))
    return x_BCHW.index_copy(0, position_M, out_MCHW)


def _sampling_grid(x_BCHW: Tensor, matrix_B23: Tensor) -> Tensor:
    """Return (B, H, W, 2) sampling positions in ``grid_sample`` coordinates: -1 to 1 across the image."""
    batch, _, height, width = x_BCHW.shape
    row_H = torch.arange(height, device=x_BCHW.device) + 0.5 - height / 2
    column_W = torch.arange(width, device=x_BCHW.device) + 0.5 - width / 2
    grid = torch.meshgrid(row_H, column_W, indexing="ij")
    place_HW3 = torch.stack([grid[1], grid[0], torch.ones_like(grid[0])], -1)
    half_2 = noise.to_device(torch.tensor([width / 2, height / 2]), x_BCHW.device)
    return (place_HW3.view(1, -1, 3) @ (matrix_B23 / half_2[:, None]).mT).view(batch, height, width, 2)


def _round_levels(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.clamp(0, 255).round().to(torch.uint8)


def _blend(x_BCHW: Tensor, other: Tensor, factor_B: Tensor) -> Tensor:
    # Both weights are rounded from double, so that results are truncated as in torchvision.
    factor_B111 = factor_B.double()[:, None, None, None]
    out_BCHW = factor_B111.float() * x_BCHW + (1 - factor_B111).float() * other
    return out_BCHW.clamp(0, 255).to(torch.uint8)


def _resize_weights(start_B: Tensor, length_B: Tensor, size: int, kernel: str) -> Tensor:
    """Return (B, O, size) weights of each input pixel in each of ``size`` output pixels."""
    input_I = torch.arange(size, device=start_B.device)
    center_BO = start_B[:, None] + (input_I + 0.5) * length_B[:, None] / size - 0.5
    distance_BOI = (center_BO[:, :, None] - input_I).abs()
    if kernel == "bilinear":
        weight_BOI = (1 - distance_BOI).clamp(min=0)
    else:
        near_BOI = (1.5 * distance_BOI - 2.5) * distance_BOI**2 + 1
        far_BOI = ((-0.5 * distance_BOI + 2.5) * distance_BOI - 4) * distance_BOI + 2
        weight_BOI = torch.where(distance_BOI < 1, near_BOI, torch.where(distance_BOI < 2, far_BOI, 0))
    inside_B1I = ((input_I >= start_B[:, None]) & (input_I < (start_B + length_B)[:, None]))[:, None]
    weight_BOI = torch.where(inside_B1I, weight_BOI, 0)
    return weight_BOI / weight_BOI.sum(2, keepdim=True)
