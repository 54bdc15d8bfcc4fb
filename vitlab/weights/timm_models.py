"""Arguments of timm's entry points: what an architecture's name in a config.json means beyond the tensors.

timm itself is not imported.  The table holds its plain, distilled, hybrid and rotary Vision Transformers, and of their
arguments those that no name or shape of a tensor shows.  ``python tools/timm_table.py`` prints it anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any


def entry_point(architecture: str) -> dict[str, Any] | None:
    """Return the arguments that timm passes to the model class of ``architecture``; None if it is not in the table.

    Arguments are those of timm's classes; ``class`` names the class, ``eps`` is that of ``norm_layer``, and
    ``backbone`` is the class of a hybrid's network.
    """
    return _rows().get(architecture)


def architectures() -> list[str]:
    """Return the names of the supported architectures of timm."""
    return list(_rows())


@cache
def _rows() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}
    complete = True
    for line in TABLE.strip().splitlines():
        if line.startswith(" "):
            complete = True
            for name, _, heads in (entry.partition(":") for entry in line.split()):
                rows[name] = {"class": "VisionTransformer", **settings, "num_heads": int(heads)}
            continue
        settings = {} if complete else settings
        complete = False
        for setting in line.removeprefix("-").split():
            key, _, text = setting.partition("=")
            try:
                settings[key] = json.loads(text)
            except ValueError:
                settings[key] = text
    return rows


TABLE = """
-
    deit_base_distilled_patch16_224:12 deit_base_distilled_patch16_384:12 deit_base_patch16_224:12
    deit_base_patch16_384:12 deit_small_distilled_patch16_224:6 deit_small_patch16_224:6
    deit_tiny_distilled_patch16_224:3 deit_tiny_patch16_224:3 test_vit:2 vit_base_patch14_dinov2:12
    vit_base_patch16_224:12 vit_base_patch16_224_miil:12 vit_base_patch16_384:12 vit_base_patch16_plus_240:14
    vit_base_patch32_224:12 vit_base_patch32_384:12 vit_base_patch32_plus_256:14 vit_base_patch8_224:12
    vit_giant_patch14_224:16 vit_gigantic_patch14_224:16 vit_huge_patch14_224:16 vit_intern300m_patch14_448:16
    vit_large_patch14_224:16 vit_large_patch14_dinov2:16 vit_large_patch16_224:16 vit_large_patch16_384:16
    vit_large_patch32_224:16 vit_large_patch32_384:16 vit_small_patch14_dinov2:6 vit_small_patch16_224:6
    vit_small_patch16_36x1_224:6 vit_small_patch16_384:6 vit_small_patch32_224:6 vit_small_patch32_384:6
    vit_small_patch8_224:6 vit_tiny_patch16_224:3 vit_tiny_patch16_384:3
act_layer=SiLU mlp_layer=GluMlp
    vit_giant_patch14_dinov2:24
act_layer=SiLU mlp_layer=GluMlp no_embed_class=true
    vit_giant_patch14_reg1_tipsv2:24 vit_giant_patch14_reg4_dinov2:24
act_layer=gelu_tanh global_pool=avg
    vit_base_patch32_siglip_gap_256:12 vit_giantopt_patch16_siglip_gap_256:16 vit_giantopt_patch16_siglip_gap_384:16
    vit_large_patch16_siglip_gap_512:16 vit_so400m_patch16_siglip_gap_256:16 vit_so400m_patch16_siglip_gap_384:16
    vit_so400m_patch16_siglip_gap_512:16
act_layer=gelu_tanh global_pool=map
    vit_base_patch32_siglip_256:12 vit_giantopt_patch16_siglip_256:16 vit_giantopt_patch16_siglip_384:16
    vit_large_patch16_siglip_512:16 vit_so400m_patch16_siglip_256:16 vit_so400m_patch16_siglip_384:16
    vit_so400m_patch16_siglip_512:16
act_layer=quick_gelu eps=1e-05 norm_layer=LayerNorm
    vit_base_patch16_clip_quickgelu_224:12 vit_base_patch32_clip_quickgelu_224:12
    vit_gigantic_patch14_clip_quickgelu_224:16 vit_huge_patch14_clip_quickgelu_224:16
    vit_huge_patch14_clip_quickgelu_378:16 vit_large_patch14_clip_quickgelu_224:16
    vit_large_patch14_clip_quickgelu_336:16
act_layer=silu global_pool=avg mlp_layer=SwiGLU eps=1e-05 norm_layer=RmsNorm
    aimv2_1b_patch14_224:16 aimv2_1b_patch14_336:16 aimv2_1b_patch14_448:16 aimv2_3b_patch14_224:24
    aimv2_3b_patch14_336:24 aimv2_3b_patch14_448:24 aimv2_huge_patch14_224:12 aimv2_huge_patch14_336:12
    aimv2_huge_patch14_448:12 aimv2_large_patch14_224:8 aimv2_large_patch14_336:8 aimv2_large_patch14_448:8
attn_layer=diff global_pool=avg no_embed_class=true
    vit_dlittle_patch16_reg1_gap_256:5 vit_dwee_patch16_reg1_gap_256:4
backbone=ConvStem no_embed_class=true
    vit_base_mci_224:12
backbone=FeatureListNet
    vit_base_resnet26d_224:12 vit_base_resnet50d_224:12 vit_small_resnet26d_224:8 vit_small_resnet50d_s16_224:8
backbone=ResNetV2
    vit_base_r26_s32_224:12 vit_base_r50_s16_224:12 vit_base_r50_s16_384:12 vit_large_r50_s32_224:16
    vit_large_r50_s32_384:16 vit_small_r26_s32_224:6 vit_small_r26_s32_384:6
backbone=Sequential
    vit_tiny_r_s16_p8_224:3 vit_tiny_r_s16_p8_384:3
block_fn=DiffParallelScalingBlock global_pool=avg no_embed_class=true
    vit_dpwee_patch16_reg1_gap_256:4
block_fn=ParallelScalingBlock global_pool=avg no_embed_class=true
    vit_pwee_patch16_reg1_gap_256:4
block_fn=ParallelScalingBlock no_embed_class=true norm_layer=RmsNorm
    vit_base_patch16_xp_224:12 vit_huge_patch14_xp_224:16 vit_large_patch14_xp_224:16
block_fn=ParallelThingsBlock
    vit_base_patch16_18x2_224:12 vit_small_patch16_18x2_224:6
block_fn=ResPostBlock global_pool=avg
    vit_base_patch16_rpn_224:12
class=Eva
    eva_giant_patch14_224:16 eva_giant_patch14_336:16 eva_giant_patch14_560:16
class=Eva attn_only_layer_scale=true global_pool=token eps=1e-06 norm_layer=RmsNorm num_kv_heads=[12,24]
rope_rotate_half=true rope_temperature=100 rope_type=dinov3 use_rot_pos_emb=true
    vit_giant_patch16_sapiens2:24
class=Eva attn_only_layer_scale=true global_pool=token eps=1e-06 norm_layer=RmsNorm num_kv_heads=[12]
rope_rotate_half=true rope_temperature=100 rope_type=dinov3 use_rot_pos_emb=true
    vit_base_patch16_sapiens2:12
class=Eva attn_only_layer_scale=true global_pool=token eps=1e-06 norm_layer=RmsNorm num_kv_heads=[16,32]
rope_rotate_half=true rope_temperature=100 rope_type=dinov3 use_rot_pos_emb=true
    vit_5b_patch16_sapiens2:32
class=Eva attn_only_layer_scale=true global_pool=token eps=1e-06 norm_layer=RmsNorm num_kv_heads=[8,16]
rope_rotate_half=true rope_temperature=100 rope_type=dinov3 use_rot_pos_emb=true
    vit_huge_patch16_sapiens2:16 vit_large_patch16_sapiens2:16
class=Eva attn_pool_num_heads=8 global_pool=map eps=1e-05 norm_layer=LayerNorm ref_feat_shape=[14,14]
rope_grid_indexing=xy rope_grid_offset=1.0 use_rot_pos_emb=true
    vit_pe_core_base_patch16_224:12
class=Eva attn_pool_num_heads=8 global_pool=map eps=1e-05 norm_layer=LayerNorm ref_feat_shape=[24,24]
rope_grid_indexing=xy rope_grid_offset=1.0 use_rot_pos_emb=true
    vit_pe_core_large_patch14_336:16 vit_pe_core_small_patch16_384:6 vit_pe_core_tiny_patch16_384:3
class=Eva attn_pool_num_heads=8 global_pool=map eps=1e-05 norm_layer=LayerNorm ref_feat_shape=[32,32]
rope_grid_indexing=xy use_rot_pos_emb=true
    vit_pe_core_gigantic_patch14_448:16
class=Eva eps=1e-05 norm_layer=LayerNorm ref_feat_shape=[32,32] rope_grid_indexing=xy rope_grid_offset=1.0
use_rot_pos_emb=true
    vit_pe_lang_large_patch14_448:16 vit_pe_spatial_base_patch16_512:12 vit_pe_spatial_large_patch14_448:16
    vit_pe_spatial_small_patch16_512:6 vit_pe_spatial_tiny_patch16_512:3
class=Eva eps=1e-05 norm_layer=LayerNorm ref_feat_shape=[32,32] rope_grid_indexing=xy use_rot_pos_emb=true
    vit_pe_lang_gigantic_patch14_448:16 vit_pe_spatial_gigantic_patch14_448:16
class=Eva eps=1e-05 norm_layer=LayerNorm rope_rotate_half=true rope_temperature=100 rope_type=dinov3
use_rot_pos_emb=true
    vit_7b_patch16_dinov3:32 vit_base_patch16_dinov3:12 vit_base_patch16_dinov3_qkvb:12
    vit_huge_plus_patch16_dinov3:20 vit_huge_plus_patch16_dinov3_qkvb:20 vit_large_patch16_dinov3:16
    vit_large_patch16_dinov3_qkvb:16 vit_small_patch16_dinov3:6 vit_small_patch16_dinov3_qkvb:6
    vit_small_plus_patch16_dinov3:6 vit_small_plus_patch16_dinov3_qkvb:6 vit_tiny_patch16_dinov3_qkvb:3
class=Eva global_pool=token
    eva_giant_patch14_clip_224:16
class=Eva global_pool=token eps=1e-05 norm_layer=LayerNorm rope_rotate_half=true rope_temperature=100 rope_type=dinov3
use_rot_pos_emb=true
    vit_base_patch16_lingbot:12 vit_giant_patch16_lingbot:24 vit_large_patch16_lingbot:16
    vit_small_patch16_lingbot:6
class=Eva global_pool=token no_embed_class=true rope_grid_indexing=xy rope_temperature=10.0 rope_type=mixed
use_rot_pos_emb=true
    vit_base_patch16_rope_mixed_ape_224:12 vit_large_patch16_rope_mixed_ape_224:16
    vit_small_patch16_rope_mixed_ape_224:6
class=Eva global_pool=token no_embed_class=true rope_grid_indexing=xy rope_temperature=100.0 use_rot_pos_emb=true
    vit_base_patch16_rope_ape_224:12 vit_large_patch16_rope_ape_224:16 vit_small_patch16_rope_ape_224:6
class=Eva global_pool=token ref_feat_shape=[16,16] use_rot_pos_emb=true
    eva02_base_patch16_clip_224:12 eva02_large_patch14_clip_224:16 eva02_large_patch14_clip_336:16
class=Eva global_pool=token rope_grid_indexing=xy rope_temperature=10.0 rope_type=mixed use_rot_pos_emb=true
    vit_base_patch16_rope_mixed_224:12 vit_large_patch16_rope_mixed_224:16 vit_small_patch16_rope_mixed_224:6
class=Eva global_pool=token rope_grid_indexing=xy rope_temperature=100.0 use_rot_pos_emb=true
    vit_base_patch16_rope_224:12 vit_large_patch16_rope_224:16 vit_small_patch16_rope_224:6
class=Eva global_pool=token use_post_norm=true
    eva02_enormous_patch14_clip_224:16
class=Eva ref_feat_shape=[16,16] use_rot_pos_emb=true
    eva02_base_patch14_224:12 eva02_base_patch14_448:12 eva02_large_patch14_224:16 eva02_large_patch14_448:16
    eva02_small_patch14_224:6 eva02_small_patch14_336:6 eva02_tiny_patch14_224:3 eva02_tiny_patch14_336:3
    vit_base_patch16_rope_reg1_gap_256:12 vit_betwixt_patch16_rope_reg4_gap_256:10
    vit_medium_patch16_rope_reg1_gap_256:8 vit_mediumd_patch16_rope_reg1_gap_256:8
eps=1e-05 norm_layer=LayerNorm
    vit_base_patch16_clip_224:12 vit_base_patch16_clip_384:12 vit_base_patch16_plus_clip_240:14
    vit_base_patch32_clip_224:12 vit_base_patch32_clip_256:12 vit_base_patch32_clip_384:12
    vit_base_patch32_clip_448:12 vit_betwixt_patch32_clip_224:10 vit_giant_patch14_clip_224:16
    vit_gigantic_patch14_clip_224:16 vit_gigantic_patch14_clip_378:16 vit_huge_patch14_clip_224:16
    vit_huge_patch14_clip_336:16 vit_huge_patch14_clip_378:16 vit_large_patch14_clip_224:16
    vit_large_patch14_clip_336:16 vit_medium_patch16_clip_224:8 vit_medium_patch32_clip_224:8
    vit_xsmall_patch16_clip_224:4
global_pool=avg
    eva_large_patch14_196:16 eva_large_patch14_336:16 test_vit2:2 vit_base_patch16_gap_224:16
    vit_base_patch16_siglip_gap_224:12 vit_base_patch16_siglip_gap_256:12 vit_base_patch16_siglip_gap_384:12
    vit_base_patch16_siglip_gap_512:12 vit_betwixt_patch16_gap_256:10 vit_giant_patch16_gap_224:16
    vit_huge_patch14_gap_224:16 vit_huge_patch16_gap_448:16 vit_large_patch16_siglip_gap_256:16
    vit_large_patch16_siglip_gap_384:16 vit_medium_patch16_gap_240:8 vit_medium_patch16_gap_256:8
    vit_medium_patch16_gap_384:8 vit_so150m2_patch16_reg1_gap_256:13 vit_so150m2_patch16_reg1_gap_384:13
    vit_so150m2_patch16_reg1_gap_448:13 vit_so150m_patch16_reg4_gap_256:14 vit_so150m_patch16_reg4_gap_384:14
    vit_so400m_patch14_siglip_gap_224:16 vit_so400m_patch14_siglip_gap_378:16 vit_so400m_patch14_siglip_gap_384:16
    vit_so400m_patch14_siglip_gap_448:16 vit_so400m_patch14_siglip_gap_896:16
global_pool=avg eps=1e-05 norm_layer=LayerNorm
    beit3_base_patch16_224:12 beit3_giant_patch14_224:16 beit3_giant_patch14_336:16 beit3_large_patch16_224:16
global_pool=avg no_embed_class=true
    vit_base_patch16_reg4_gap_256:12 vit_betwixt_patch16_reg1_gap_256:10 vit_betwixt_patch16_reg4_gap_256:10
    vit_betwixt_patch16_reg4_gap_384:10 vit_little_patch16_reg1_gap_256:5 vit_little_patch16_reg4_gap_256:5
    vit_medium_patch16_reg1_gap_256:8 vit_medium_patch16_reg4_gap_256:8 vit_mediumd_patch16_reg4_gap_256:8
    vit_mediumd_patch16_reg4_gap_384:8 vit_wee_patch16_reg1_gap_256:4
global_pool=avg norm_layer=rmsnorm
    test_vit4:3
global_pool=map
    vit_base_patch16_siglip_224:12 vit_base_patch16_siglip_256:12 vit_base_patch16_siglip_384:12
    vit_base_patch16_siglip_512:12 vit_large_patch16_siglip_256:16 vit_large_patch16_siglip_384:16
    vit_so150m_patch16_reg4_map_256:14 vit_so400m_patch14_siglip_224:16 vit_so400m_patch14_siglip_378:16
    vit_so400m_patch14_siglip_384:16
global_pool=map pool_include_prefix=true
    test_vit3:3
no_embed_class=true
    deit3_base_patch16_224:12 deit3_base_patch16_384:12 deit3_huge_patch14_224:16 deit3_large_patch16_224:16
    deit3_large_patch16_384:16 deit3_medium_patch16_224:8 deit3_small_patch16_224:6 deit3_small_patch16_384:6
    flexivit_base:12 flexivit_large:16 flexivit_small:6 vit_base_patch14_reg1_tipsv2:12
    vit_base_patch14_reg4_dinov2:12 vit_base_patch16_radio_v3:12 vit_giant_patch16_radio_v3:24
    vit_huge_patch16_radio_v3:16 vit_huge_patch16_radio_v4:16 vit_large_patch14_reg1_tipsv2:16
    vit_large_patch14_reg4_dinov2:16 vit_large_patch16_radio_v3:16 vit_small_patch14_reg4_dinov2:6
    vit_so400m_patch14_reg1_tipsv2:16 vit_so400m_patch16_radio_v4:16
"""
"""Settings that several entry points share, ``-`` for none; indented below them, each name and its heads."""


def key_set(text: str) -> frozenset[str]:
    """Return the keys in a text that separates them by white space."""
    return frozenset(text.split())


CONFIG_KEYS = key_set(
    """
    architecture num_classes num_features global_pool pretrained_cfg model_args label_names label_descriptions labels
    """
)
PRETRAINED_KEYS = key_set(
    """
    url file state_dict hf_hub_id hf_hub_filename source architecture tag custom_load input_size test_input_size
    min_input_size fixed_input_size interpolation crop_pct test_crop_pct crop_mode mean std num_classes label_offset
    label_names label_descriptions pool_size test_pool_size first_conv classifier license description origin_url
    paper_name paper_ids notes crop_border test_crop_mode
    """
)
"""Keys of timm's ``PretrainedCfg``; of these, ``input_size``, ``mean``, ``std`` and ``label_names`` are mapped."""

IN_TENSORS = key_set(
    """
    in_chans num_classes mlp_ratio qkv_bias qk_norm init_values class_token pos_embed pre_norm final_norm fc_norm
    proj_bias scale_attn_norm scale_mlp_norm use_abs_pos_emb use_fc_norm use_pre_transformer_norm
    use_post_transformer_norm qkv_fused swiglu_mlp swiglu_align_to scale_mlp scale_attn_inner attn_type
    attn_pool_mlp_ratio embed_dim depth patch_size reg_tokens num_reg_tokens distilled
    """
)
"""Arguments whose effect is in the names and shapes of the tensors."""

WITHOUT_EFFECT = key_set(
    """
    drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate weight_init fix_init
    head_init_scale dynamic_img_size dynamic_img_pad strict_img_size device dtype rope_shift_coords rope_jitter_coords
    rope_rescale_coords embed_args
    """
)
"""Arguments that only affect training, initial values or images of another size."""

MAPPED = key_set(
    """
    class num_heads img_size no_embed_class global_pool norm_layer eps act_layer use_rot_pos_emb rope_type
    rope_temperature rope_grid_indexing rope_grid_offset rope_rotate_half ref_feat_shape pool_include_prefix
    """
)

ONE_VALUE: Mapping[str, tuple[Any, ...]] = {
    "block_fn": (None, "Block", "ParallelThingsBlock"),
    "attn_layer": (None, "", "attn", "Attention"),
    "mlp_layer": (None, "Mlp", "SwiGLU"),
    "embed_layer": (None, "PatchEmbed"),
    "embed_norm_layer": (None, "", "layernorm", "LayerNorm"),
    "backbone": (None, "ResNetV2", "Sequential"),
    "use_post_norm": (None, False),
    "attn_only_layer_scale": (None, False),
    "num_kv_heads": (None,),
    "attn_pool_num_heads": (None,),
    "rope_mrope_section": (None,),
    "use_naflex": (None, False),
}
"""Arguments that must have one of these values; a list is refused like any other value."""
