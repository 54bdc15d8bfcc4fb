"""Keyed random draws: a pure function of their purpose, so that there is no random state to store.

A draw is ``noise(key, sample_B, n)``.  The key identifies the seed, the stream, the epoch and the layer; the sample
identifies the example.  The draw is the same alone or in a batch, for any batch size and any number of workers, on any
device, compiled or vectorised, before or after a resume.

B samples (examples of a batch), N draws per sample.

The hash is a counter-based one in plain tensor operations on int32: two rounds of a 32-bit finaliser in the family of
MurmurHash3 (multiply, xor-shift), with the constants of Chris Wellons' search for low bias ("lowbias32", 2018, public
domain).  Keys are 64 bits, from BLAKE2b on the host or from :func:`fold` on the device.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

Key = int | Tensor
"""64 bits: a Python int, or an int64 tensor: without axes (under vmap: one per member), or as :func:`bits` says."""


def key(seed: int, *coordinates: int | str) -> int:
    """Return the key of a stream, such as ``key(3, "augment", epoch)``; other coordinates give independent draws."""
    text = "\x1f".join(str(part) for part in (seed, *coordinates))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def tensor_of(keys: Sequence[Key], device: torch.device) -> Tensor:
    """Return keys as an int64 tensor on a device, (K,)."""
    return to_device(torch.tensor(keys, dtype=torch.int64), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; to a GPU of CUDA without waiting, as a copy from unpinned memory would."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # without waiting, the tensor could be read, or freed, before it has arrived


def fold(k: Key, number: int) -> Key:
    """Return a key derived from ``k``, such as the key of one layer; on the device of ``k`` if it is a tensor."""
    # Torch.compile widens integers without axes to 64 bits inside of vmap, so they have one here.
    low, high = _split_words(k[..., None] if isinstance(k, Tensor) else k)
    if isinstance(low, Tensor):
        low = _apply_lowbias32(low + _to_signed(number * 0x9E3779B9))
        high = _apply_lowbias32(high ^ low)
        return ((high.long() << 32) | (low.long() & 0xFFFFFFFF))[..., 0]
    assert isinstance(high, int)
    low = _apply_lowbias32_to_int(low + number * 0x9E3779B9)
    return _to_signed(_apply_lowbias32_to_int(high ^ low)) << 32 | low


def bits(k: Key, sample_B: Tensor, n: int) -> Tensor:
    """Return 32 random bits for each sample and draw, int32 (B, N).

    Args:
        k: key of the draw; an int64 tensor (B,) has a key for each sample, and others broadcast with the samples.
        sample_B: integer identities of the samples, independent of their place in a batch.
        n: draws per sample.
    """
    low, high = _split_words(k)
    sample_B = sample_B.long()
    # Both halves of the sample and of the key are mixed in before the draws are counted.
    row_B = _apply_lowbias32(sample_B.int() ^ low)
    row_B = _apply_lowbias32(row_B ^ (sample_B >> 32).int() ^ high)
    # Without "&", torch.compile takes the product for an index, which does not overflow, and draws other numbers.
    draw_N = (torch.arange(n, dtype=torch.int32, device=sample_B.device) & 0x7FFFFFFF) * _to_signed(0x9E3779B9)
    return _apply_lowbias32(_apply_lowbias32(row_B[..., None] + draw_N) ^ row_B[..., None])


def uniform(k: Key, sample_B: Tensor, n: int) -> Tensor:
    """Return uniform draws in [0, 1) on a grid of 2^-24, float32 (B, N)."""
    # 24 bits are what float32 holds exactly below 1.
    return ((bits(k, sample_B, n) >> 8) & 0xFFFFFF).float() * 2.0**-24


def integers(k: Key, sample_B: Tensor, n: int, below: int | Tensor) -> Tensor:
    """Return uniform integers in [0, below), int64 (B, N); ``below`` is one number, or one for each draw, (B, N)."""
    return (bits(k, sample_B, n).long() & 0xFFFFFFFF) * below >> 32


def normal(k: Key, sample_B: Tensor, n: int) -> Tensor:
    """Return standard normal draws (Box and Muller, 1958), float32 (B, N)."""
    pairs = (n + 1) // 2
    # log1p of -u, since u may be 0 and is never 1.
    u_BN = uniform(k, sample_B, 2 * pairs)
    radius_BP = torch.sqrt(-2 * torch.log1p(-u_BN[:, :pairs]))
    angle_BP = 2 * torch.pi * u_BN[:, pairs:]
    return torch.cat([radius_BP * torch.cos(angle_BP), radius_BP * torch.sin(angle_BP)], 1)[:, :n]


def permutation(k: Key, n: int) -> Tensor:
    """Return a permutation of 0..n-1 by sorting 62 random bits each, int64 (N,)."""
    return order(k, torch.arange(n))


def order(k: Key, sample_N: Tensor) -> Tensor:
    """Return the places of samples, sorted by 62 random bits of each, int64 (N,)."""
    # 62 bits: ties, which stable sorting would decide by place, do not occur in practice.
    word_N2 = bits(k, sample_N, 2).long() & 0x7FFFFFFF
    return torch.argsort((word_N2[:, 0] << 31) | word_N2[:, 1], stable=True)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators on the CPU and on ``device``, as ``torch.manual_seed`` does.

    ``torch.manual_seed`` visits every backend and records the caller's stack for each, which takes 0.2 ms.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        getattr(torch, device.type).manual_seed(seed)


class Draws(NamedTuple):
    """Sources of a model's random draws in one step: a key for each stream, and the samples of the batch."""

    dropout: Key
    drop_path: Key
    sample_B: Tensor
    step: Key  #: of draws that all samples of a step share
    scale_LB: Tensor | tuple[()] = ()
    """Factors of the residual branches of L layers with drop path, drawn together; empty if each layer draws its own.
    On a GPU, a layer's own hash is 50 kernels."""


_scope: list[Draws] = []


@contextmanager
def use_model_draws(draws: Draws) -> Iterator[None]:
    """Use ``draws`` for dropout and drop-path inside the block; outside, torch's own generator is used."""
    _scope.append(draws)
    try:
        yield
    finally:
        _scope.pop()


def current() -> Draws | None:
    """Return the draws of the current step, or None outside a step."""
    return _scope[-1] if _scope else None


def _split_words(k: Key) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """Return the low and high half of a key as signed 32-bit words."""
    if isinstance(k, Tensor):
        return k.int(), (k >> 32).int()
    return _to_signed(k), _to_signed(k >> 32)


def _to_signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _apply_lowbias32_to_int(word: int) -> int:
    """Apply lowbias32 to a word, as :func:`_apply_lowbias32` does; return it without sign."""
    word &= 0xFFFFFFFF
    word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF
    word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
    return word ^ word >> 16


def _apply_lowbias32(x: Tensor) -> Tensor:
    """Apply lowbias32, a bijection of 32-bit words in which an input bit flips each output bit about half the time."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _to_signed(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _to_signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)
