"""Rows of :mod:`vitlab.weights.timm_models`, read off timm's own entry points.

``python tools/timm_table.py`` prints the table of the timm that is installed.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Mapping
from typing import Any

from vitlab.data.torchvision_import import torchvision

torchvision("torchvision.models")
import timm  # noqa: E402
from timm.models import deit, eva, vision_transformer, vision_transformer_hybrid  # noqa: E402

FACTORIES = {
    vision_transformer: ("_create_vision_transformer", "VisionTransformer"),
    vision_transformer_hybrid: ("_create_vision_transformer_hybrid", "VisionTransformer"),
    deit: ("_create_deit", "VisionTransformer"),
    eva: ("_create_eva", "Eva"),
}
UNRECORDED = """
patch_size in_chans embed_dim depth mlp_ratio qkv_bias qk_norm init_values class_token reg_tokens num_reg_tokens
pos_embed pre_norm final_norm fc_norm proj_bias scale_attn_norm scale_mlp_norm use_abs_pos_emb use_fc_norm
use_pre_transformer_norm use_post_transformer_norm qkv_fused swiglu_mlp swiglu_align_to scale_mlp scale_attn_inner
distilled attn_pool_mlp_ratio attn_type embed_args embed_norm_layer img_size dynamic_img_size rope_rescale_coords
"""
"""Arguments whose effect on the function is in the names and shapes of the tensors, or is none."""


class _Arguments(Exception):
    """The arguments that an entry point was about to build its model with."""


def names() -> list[str]:
    """Return the entry points of the modules in the table."""
    modules = [module.__name__.rpartition(".")[2] for module in FACTORIES]
    return sorted(name for module in modules for name in timm.list_models(module=module))


def arguments(name: str) -> dict[str, Any]:
    """Return what timm's entry point ``name`` sets beyond the tensors, in the words of the table."""
    entry_point = timm.model_entrypoint(name)
    module = next(each for each in FACTORIES if each.__name__ == entry_point.__module__)
    factory, kind = FACTORIES[module]

    def caught(variant: str, pretrained: bool = False, **options: Any) -> None:
        raise _Arguments(options)

    original = getattr(module, factory)
    setattr(module, factory, caught)
    try:
        entry_point()
        raise AssertionError(f"{name} does not call {factory}")
    except _Arguments as arguments:
        options = arguments.args[0]
    finally:
        setattr(module, factory, original)
    row = {"class": kind} if kind == "Eva" else {}
    for option, value in sorted(options.items()):
        if option in UNRECORDED.split():
            continue
        if isinstance(value, functools.partial):
            if option == "norm_layer":
                row["eps"] = value.keywords["eps"]
            value = value.func
        if option == "backbone":
            value = type(value).__name__
        if isinstance(value, type):
            value = value.__name__
        row[option] = sorted(set(value)) if option == "num_kv_heads" else list(value) if type(value) is tuple else value
    return row


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the table: settings, and indented below them each ``name:heads``."""
    groups: dict[str, list[str]] = {}
    for name, row in rows.items():
        shared = {key: value for key, value in row.items() if key != "num_heads"}
        settings = " ".join(f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in shared.items())
        groups.setdefault(settings.replace('"', "") or "-", []).append(f"{name}:{row['num_heads']}")
    lines = []
    for settings, members in sorted(groups.items()):
        lines += textwrap.wrap(settings, 118, break_long_words=False, break_on_hyphens=False)
        lines += textwrap.wrap(
            " ".join(members), 116, initial_indent="    ", subsequent_indent="    ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    print(table({name: arguments(name) for name in names()}))
