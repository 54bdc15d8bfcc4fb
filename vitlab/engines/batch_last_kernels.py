"""Operations of the engine ``batch_last``, whose last axis is images, or tokens times images.

For the letters of the axes see :mod:`vitlab.engines.batch_last`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Normalise(torch.autograd.Function):
    """Layer norm over axis 1 of (K, D, M), with a scale and a shift (K, D) each."""

    @staticmethod
    def forward(ctx: Any, x_KDM: Tensor, weight_KD: Tensor, bias_KD: Tensor, eps: float) -> Tensor:
        """Return the normalised values."""
        y_KDM = x_KDM - x_KDM.mean(1, keepdim=True)
        scale_K1M = y_KDM.square().mean(1, keepdim=True).add_(eps).rsqrt_()
        y_KDM.mul_(scale_K1M)
        ctx.save_for_backward(y_KDM, scale_K1M, weight_KD)
        return torch.addcmul(bias_KD[..., None], y_KDM, weight_KD[..., None])

    @staticmethod
    def backward(ctx: Any, grad_KDM: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of the input, the scale and the shift."""
        y_KDM, scale_K1M, weight_KD = ctx.saved_tensors
        along_KDM = grad_KDM * y_KDM
        weight_K1D, share = weight_KD[:, None], 1 / weight_KD.shape[1]
        grad_input_KDM = grad_KDM * weight_KD[..., None]
        grad_input_KDM.sub_(weight_K1D @ grad_KDM, alpha=share).addcmul_(y_KDM, weight_K1D @ along_KDM, value=-share)
        return grad_input_KDM.mul_(scale_K1M), along_KDM.sum(2), grad_KDM.sum(2), None


class Rotate(torch.autograd.Function):
    """Rotation of queries or keys, the first of N tensors (K, N, H, E, T, B), by angles per trial, pair and token.

    Cosines and sines are (K, H, E/2, T, 1); H may be 1, for the same angles in every head.
    """

    @staticmethod
    def forward(ctx: Any, x_KNHETB: Tensor, cos_KHPT1: Tensor, sin_KHPT1: Tensor) -> Tensor:
        """Return the first tensor rotated and the others unchanged."""
        rotated = _copy_with_first_rotated(x_KNHETB, cos_KHPT1, sin_KHPT1)
        ctx.save_for_backward(rotated, cos_KHPT1, sin_KHPT1)
        return rotated

    @staticmethod
    def backward(ctx: Any, grad_KNHETB: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of the input, the cosines and the sines."""
        rotated, cos_KHPT1, sin_KHPT1 = ctx.saved_tensors
        grad_input = _copy_with_first_rotated(grad_KNHETB, cos_KHPT1, -sin_KHPT1)
        if not any(ctx.needs_input_grad[1:]):
            return grad_input, None, None
        even, odd = _channel_pairs(_copy_with_first_rotated(rotated, cos_KHPT1, -sin_KHPT1))  # of the input
        grad_even, grad_odd = _channel_pairs(grad_KNHETB)
        grad_cos = (grad_even * even).addcmul_(grad_odd, odd).sum_to_size(cos_KHPT1.shape)
        grad_sin = (grad_odd * even).addcmul_(grad_even, odd, value=-1).sum_to_size(cos_KHPT1.shape)
        return grad_input, grad_cos, grad_sin


def _copy_with_first_rotated(x_KNHETB: Tensor, cos_KHPT1: Tensor, sin_KHPT1: Tensor) -> Tensor:
    out = torch.empty_like(x_KNHETB)
    out[:, 1:] = x_KNHETB[:, 1:]
    even, odd = _channel_pairs(x_KNHETB)
    out_even, out_odd = _channel_pairs(out)
    torch.mul(even, cos_KHPT1, out=out_even).addcmul_(odd, sin_KHPT1, value=-1)
    torch.mul(odd, cos_KHPT1, out=out_odd).addcmul_(even, sin_KHPT1)
    return out


def _channel_pairs(x_KNHETB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the even and the odd channels of the first tensor, each (K, H, E/2, T, B)."""
    return x_KNHETB[:, 0, :, 0::2], x_KNHETB[:, 0, :, 1::2]


class Attend(torch.autograd.Function):
    """Scaled dot-product attention of queries (K, H, E, Q, B) to keys and values (K, 2, H, E, S, B).

    A bias on the logits is (K, H, Q, S) or None; H may be 1, for the same bias in every head.
    """

    @staticmethod
    def forward(ctx: Any, q_KHEQB: Tensor, kv: Tensor, bias_KHQS: Tensor | None, scale: float) -> Tensor:
        """Return the weighted values, (K, H, E, Q, B)."""
        k, v = kv.unbind(1)
        logits_KHQSB = pairwise_dot_products(q_KHEQB * scale, k)
        if bias_KHQS is not None:
            logits_KHQSB.add_(bias_KHQS[..., None])
        weights_KHQSB = logits_KHQSB.softmax(3)
        ctx.save_for_backward(q_KHEQB, kv, weights_KHQSB)
        ctx.scale, ctx.bias_shape = scale, None if bias_KHQS is None else bias_KHQS.shape
        return sum_over_tokens(weights_KHQSB.unbind(3), v.unbind(3))

    @staticmethod
    def backward(ctx: Any, grad_KHEQB: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return the gradients of queries, of keys and values, and of the bias."""
        q_KHEQB, kv, weights_KHQSB = ctx.saved_tensors
        k, v = kv.unbind(1)
        grad_kv = torch.empty_like(kv)
        grad_k, grad_v = grad_kv.unbind(1)
        sum_over_tokens(weights_KHQSB.unbind(2), grad_KHEQB.unbind(3), grad_v)
        logits_KHQSB = pairwise_dot_products(grad_KHEQB, v)
        # Gradient of the softmax: w * (g - sum of w * g over keys).
        logits_KHQSB = torch._softmax_backward_data(logits_KHQSB, weights_KHQSB, 3, logits_KHQSB.dtype)
        grad_bias = logits_KHQSB.sum(-1).sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[2] else None
        logits_KHQSB.mul_(ctx.scale)
        grad_q = sum_over_tokens(logits_KHQSB.unbind(3), k.unbind(3))
        sum_over_tokens(logits_KHQSB.unbind(2), q_KHEQB.unbind(3), grad_k)
        return grad_q, grad_kv, grad_bias, None


def pairwise_dot_products(a_KHEQB: Tensor, b_KHESB: Tensor) -> Tensor:
    """Return the sums over channels of the products of all pairs of tokens, (K, H, Q, S, B)."""
    (a, *others), (b, *partners) = a_KHEQB.unbind(2), b_KHESB.unbind(2)
    sum_KHQSB = a[:, :, :, None] * b[:, :, None]
    for a, b in zip(others, partners, strict=True):
        sum_KHQSB.addcmul_(a[:, :, :, None], b[:, :, None])
    return sum_KHQSB


def sum_over_tokens(weights: Sequence[Tensor], values: Sequence[Tensor], out_KHETB: Tensor | None = None) -> Tensor:
    """Return the sum over tokens of weight (K, H, T, B) times value (K, H, E, B), as (K, H, E, T, B).

    Both are sequences with one tensor per token; the sum is written to ``out_KHETB`` if given.
    """
    sum_KHETB = torch.mul(weights[0][:, :, None], values[0][:, :, :, None], out=out_KHETB)
    for weight, value in zip(weights[1:], values[1:], strict=True):
        sum_KHETB.addcmul_(weight[:, :, None], value[:, :, :, None])
    return sum_KHETB


def apply_affine_map(weight_KOI: Tensor, bias_KO: Tensor | None, x_KIM: Tensor) -> Tensor:
    """Apply an affine map, (K, I, M) to (K, O, M); the kernel of a patch convolution is flattened."""
    weight_KOI = weight_KOI.flatten(2)
    return weight_KOI @ x_KIM if bias_KO is None else torch.baddbmm(bias_KO[..., None], weight_KOI, x_KIM)
