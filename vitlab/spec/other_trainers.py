"""Options of timm, DeiT, transformers, Lightning and torchvision's references, and how a study file writes them."""

from __future__ import annotations

import re

ANSWERS = {
    "write train.schedule: {type: cosine, warmup: 0.05}, a share of the training": (
        "warmup_epochs warmup_steps warmup_ratio warmup num_warmup_steps lr_warmup_epochs warmup_lr"
    ),
    "write train.schedule: {type: cosine, final: 0.01}, a share of the largest rate": "min_lr lr_min",
    "write train.schedule: cosine": "sched lr_scheduler_type",
    "write train.schedule: {type: wsd, cooldown: 0.1}": "cooldown_epochs",
    "write run.micro_batch_size: N to save memory; train.batch_size counts the images of a step": (
        "accum_iter grad_accum_steps gradient_accumulation_steps accumulate_grad_batches"
    ),
    "write train.ema: {decay: 0.9999}": "model_ema model_ema_decay ema_decay",
    "write train.optimizer: {type: adamw, lr: 1e-3, weight_decay: 0.05}": (
        "lr learning_rate base_lr blr weight_decay wd"
    ),
    "write train.optimizer: {type: sgd, lr: 0.1, momentum: 0.9}": "momentum",
    "write train.optimizer: adamw": "opt",
    "write train.optimizer: {type: adamw, eps: 1e-8}": "opt_eps",
    "write train.optimizer: {type: adamw, betas: [0.9, 0.999]}": "opt_betas adam_beta1 adam_beta2",
    "write seeds: 5 at the top level for replicates 0 to 4, or seeds: [7] for one": "seed random_seed",
    "write train.epochs: N": "num_epochs num_train_epochs max_epochs",
    "write train.steps: N": "max_steps max_iters",
    "write train.epochs: N, train.steps: N or train.images: N": "total_steps",
    "write train.batch_size: N, the images of a step on all devices": "per_device_train_batch_size",
    "write train.batch_size: N": "train_batch_size",
    "write data.size: 224": "img_size image_size input_size",
    "the data decides the number of classes; data.classes: [0, 1] selects some": "num_classes nb_classes",
    "write data.channels: 3": "in_chans",
    "write model: {type: vit, dim: 192, depth: 12, heads: 3}, or size: Ti": (
        "embed_dim hidden_size num_heads num_attention_heads num_hidden_layers num_layers"
    ),
    "write model.mlp: {type: gelu, ratio: 4}": "mlp_ratio intermediate_size",
    "write model.drop: 0.1": "drop_rate",
    "write model.drop_path: 0.1": "drop_path_rate",
    "write model.attention: {type: auto, drop: 0.1}": "attn_drop_rate",
    "write model.head: {type: linear, pool: gap}": "global_pool",
    "write train.loss: {type: cross_entropy, label_smoothing: 0.1}": "smoothing label_smoothing",
    "write train.mix: {mixup: 0.8, cutmix: 1.0}": "mixup cutmix mixup_alpha cutmix_alpha",
    "write train.mix: {mixup: 0.8, cutmix: 1.0, prob: 0.5}": "mixup_prob",
    "write data.augment: [flip, rand_augment, erasing], in this order; vitlab list augment shows all": (
        "aa auto_augment color_jitter hflip reprob random_erase"
    ),
    "write train.clip_grad: 1.0": "max_grad_norm gradient_clip_val",
    "write train.precision: bf16": "amp bf16 mixed_precision",
    "write train.precision: fp16": "fp16",
    "write init_from: {checkpoint: FILE}": "pretrained finetune initial_checkpoint",
    "a run resumes by itself; give the same command again": "resume resume_from_checkpoint",
    "write run.workers: N for trials at a time, or run.resources: {gpu: N} for one trial": (
        "num_workers dataloader_num_workers devices num_gpus world_size"
    ),
    "write run.device: cuda": "accelerator",
    "write vitlab run FILE --out FOLDER": "output_dir default_root_dir",
    "write train.evaluations: N, the number of evaluations": (
        "eval_steps evaluation_strategy val_check_interval check_val_every_n_epoch"
    ),
    "write run.engine: compiled": "torch_compile torchcompile",
    "write run.activation_checkpointing: blocks": "grad_checkpointing gradient_checkpointing",
}
"""What a study file says to options of other trainers that stand for it."""

HOW = {name: how for how, names in ANSWERS.items() for name in names.split()}
"""Option of another trainer to what a study file says instead."""

_SIZE = {
    "tiny": "Ti",
    "small": "S",
    "medium": "M",
    "base": "B",
    "large": "L",
    "huge": "H",
    "giant": "g",
    "gigantic": "G",
}
_TIMM = re.compile(rf"(?:\w+/)?(?:vit|deit3?)[_-]({'|'.join(_SIZE)})[_-](?:\w+[_-])?patch(\d+)(?:[_.-].*)?")
_TORCHVISION = re.compile(r"vit_([blh])_(\d+)")


def how_to_write(name: str) -> str:
    """Return in a sentence how a study file writes an option of another trainer; empty for any other name."""
    how = HOW.get(name.lower().replace("-", "_"), "")
    return f" {how[0].upper()}{how[1:]}." if how else ""


def how_to_name(model: str) -> str:
    """Return in a sentence how a study file names a ViT of timm, transformers or torchvision; empty for any other name.

    Examples: ``deit_small_patch16_224``, ``google/vit-base-patch16-224``, ``vit_b_16``.
    """
    match = _TIMM.fullmatch(model) or _TORCHVISION.fullmatch(model)
    if match is None:
        return ""
    size = _SIZE.get(match[1], match[1].upper())
    return (
        f" Write model: {{type: vit, size: {size}, patch_size: {match[2]}}}, and init_from: {{checkpoint: FILE}} for "
        "its weights."
    )
