"""Operations of the engine ``batch_last``, whose last axis is that of the images or of tokens times images.

For the letters of the axes see :mod:`vitlab.engines.batch_last`.
"""

from __future__ import annotations

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


class Attend(torch.autograd.Function):
    """Scaled dot-product attention, from queries, keys and values (K, 3, H, E, T, B) to (K, H, E, T, B)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, scale: float) -> Tensor:
        """Return the weighted values."""
        q, k, v = qkv.unbind(1)
        weights_KHQSB = over_channels(q * scale, k).softmax(3)
        ctx.save_for_backward(qkv, weights_KHQSB)
        ctx.scale = scale
        return over_tokens(weights_KHQSB.unbind(3), v.unbind(3))

    @staticmethod
    def backward(ctx: Any, grad_KHEQB: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of queries, keys and values."""
        qkv, weights_KHQSB = ctx.saved_tensors
        q, k, v = qkv.unbind(1)
        grad = torch.empty_like(qkv)
        grad_q, grad_k, grad_v = grad.unbind(1)
        over_tokens(weights_KHQSB.unbind(2), grad_KHEQB.unbind(3), grad_v)
        logits_KHQSB = over_channels(grad_KHEQB, v)
        # Gradient of the softmax: w * (g - sum of w * g over keys).
        logits_KHQSB = torch._softmax_backward_data(logits_KHQSB, weights_KHQSB, 3, logits_KHQSB.dtype)
        logits_KHQSB.mul_(ctx.scale)
        over_tokens(logits_KHQSB.unbind(3), k.unbind(3), grad_q)
        over_tokens(logits_KHQSB.unbind(2), q.unbind(3), grad_k)
        return grad, None


def over_channels(a_KHEQB: Tensor, b_KHESB: Tensor) -> Tensor:
    """Return the sums over channels of the products of all pairs of tokens, (K, H, Q, S, B)."""
    (a, *others), (b, *partners) = a_KHEQB.unbind(2), b_KHESB.unbind(2)
    sum_KHQSB = a[:, :, :, None] * b[:, :, None]
    for a, b in zip(others, partners, strict=True):
        sum_KHQSB.addcmul_(a[:, :, :, None], b[:, :, None])
    return sum_KHQSB


def over_tokens(weights: Sequence[Tensor], values: Sequence[Tensor], out_KHETB: Tensor | None = None) -> Tensor:
    """Return the sum over tokens of weight (K, H, T, B) times value (K, H, E, B), as (K, H, E, T, B).

    Both are sequences with one tensor per token; the sum is written to ``out_KHETB`` if given.
    """
    sum_KHETB = torch.mul(weights[0][:, :, None], values[0][:, :, :, None], out=out_KHETB)
    for weight, value in zip(weights[1:], values[1:], strict=True):
        sum_KHETB.addcmul_(weight[:, :, None], value[:, :, :, None])
    return sum_KHETB


def affine(weight_KOI: Tensor, bias_KO: Tensor | None, x_KIM: Tensor) -> Tensor:
    """Apply an affine map, (K, I, M) to (K, O, M); the kernel of a patch convolution is flattened."""
    weight_KOI = weight_KOI.flatten(2)
    return weight_KOI @ x_KIM if bias_KO is None else torch.baddbmm(bias_KO[..., None], weight_KOI, x_KIM)
