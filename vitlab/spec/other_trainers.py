"""Options of timm, DeiT, transformers, Lightning and torchvision's references, and how a study file writes them."""

from __future__ import annotations

import re

_SCHEDULE = "write train.schedule: {type: cosine, warmup: 0.05}, a share of the training"
_ACCUMULATION = "write run.micro_batch_size: N to save memory; train.batch_size counts the images of a step"
_AVERAGE = "write train.ema: {decay: 0.9999}"
_OPTIMIZER = "write train.optimizer: {type: adamw, lr: 1e-3, weight_decay: 0.05}"
_MIX = "write train.mix: {mixup: 0.8, cutmix: 1.0}"
_AUGMENT = "write data.augment: [flip, rand_augment, erasing], in this order; vitlab list augment shows all"
_LENGTH = "write train.epochs: N, train.steps: N or train.images: N"
_SIZES = "write model: {type: vit, dim: 192, depth: 12, heads: 3}, or size: Ti"
_HEAD = "write model.head: {type: linear, pool: gap}"
_MLP = "write model.mlp: {type: gelu, ratio: 4}"
_WEIGHTS = "write init_from: {checkpoint: FILE}"
_EVALUATIONS = "write train.evaluations: N, the number of evaluations"
_PROCESSES = "write run.workers: N for trials at a time, or run.resources: {gpu: N} for one trial"

HOW = {
    "warmup_epochs": _SCHEDULE,
    "warmup_steps": _SCHEDULE,
    "warmup_ratio": _SCHEDULE,
    "warmup": _SCHEDULE,
    "num_warmup_steps": _SCHEDULE,
    "lr_warmup_epochs": _SCHEDULE,
    "warmup_lr": _SCHEDULE,
    "min_lr": "write train.schedule: {type: cosine, final: 0.01}, a share of the largest rate",
    "lr_min": "write train.schedule: {type: cosine, final: 0.01}, a share of the largest rate",
    "sched": "write train.schedule: cosine",
    "lr_scheduler_type": "write train.schedule: cosine",
    "cooldown_epochs": "write train.schedule: {type: wsd, cooldown: 0.1}",
    "accum_iter": _ACCUMULATION,
    "grad_accum_steps": _ACCUMULATION,
    "gradient_accumulation_steps": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "model_ema": _AVERAGE,
    "model_ema_decay": _AVERAGE,
    "ema_decay": _AVERAGE,
    "lr": _OPTIMIZER,
    "learning_rate": _OPTIMIZER,
    "base_lr": _OPTIMIZER,
    "blr": _OPTIMIZER,
    "weight_decay": _OPTIMIZER,
    "wd": _OPTIMIZER,
    "momentum": "write train.optimizer: {type: sgd, lr: 0.1, momentum: 0.9}",
    "opt": "write train.optimizer: adamw",
    "opt_eps": "write train.optimizer: {type: adamw, eps: 1e-8}",
    "opt_betas": "write train.optimizer: {type: adamw, betas: [0.9, 0.999]}",
    "adam_beta1": "write train.optimizer: {type: adamw, betas: [0.9, 0.999]}",
    "adam_beta2": "write train.optimizer: {type: adamw, betas: [0.9, 0.999]}",
    "seed": "write seeds: 5 at the top level for replicates 0 to 4, or seeds: [7] for one",
    "random_seed": "write seeds: 5 at the top level for replicates 0 to 4, or seeds: [7] for one",
    "num_epochs": "write train.epochs: N",
    "num_train_epochs": "write train.epochs: N",
    "max_epochs": "write train.epochs: N",
    "max_steps": "write train.steps: N",
    "max_iters": "write train.steps: N",
    "total_steps": _LENGTH,
    "per_device_train_batch_size": "write train.batch_size: N, the images of a step on all devices",
    "train_batch_size": "write train.batch_size: N",
    "img_size": "write data.size: 224",
    "image_size": "write data.size: 224",
    "input_size": "write data.size: 224",
    "num_classes": "the data decides the number of classes; data.classes: [0, 1] selects some",
    "nb_classes": "the data decides the number of classes; data.classes: [0, 1] selects some",
    "in_chans": "write data.channels: 3",
    "embed_dim": _SIZES,
    "hidden_size": _SIZES,
    "num_heads": _SIZES,
    "num_attention_heads": _SIZES,
    "num_hidden_layers": _SIZES,
    "num_layers": _SIZES,
    "mlp_ratio": _MLP,
    "intermediate_size": _MLP,
    "drop_rate": "write model.drop: 0.1",
    "drop_path_rate": "write model.drop_path: 0.1",
    "attn_drop_rate": "write model.attention: {type: auto, drop: 0.1}",
    "global_pool": _HEAD,
    "smoothing": "write train.loss: {type: cross_entropy, label_smoothing: 0.1}",
    "label_smoothing": "write train.loss: {type: cross_entropy, label_smoothing: 0.1}",
    "mixup": _MIX,
    "cutmix": _MIX,
    "mixup_alpha": _MIX,
    "cutmix_alpha": _MIX,
    "mixup_prob": "write train.mix: {mixup: 0.8, cutmix: 1.0, prob: 0.5}",
    "aa": _AUGMENT,
    "auto_augment": _AUGMENT,
    "color_jitter": _AUGMENT,
    "hflip": _AUGMENT,
    "reprob": _AUGMENT,
    "random_erase": _AUGMENT,
    "max_grad_norm": "write train.clip_grad: 1.0",
    "gradient_clip_val": "write train.clip_grad: 1.0",
    "amp": "write train.precision: bf16",
    "fp16": "write train.precision: fp16",
    "bf16": "write train.precision: bf16",
    "mixed_precision": "write train.precision: bf16",
    "pretrained": _WEIGHTS,
    "finetune": _WEIGHTS,
    "initial_checkpoint": _WEIGHTS,
    "resume": "a run resumes by itself; give the same command again",
    "resume_from_checkpoint": "a run resumes by itself; give the same command again",
    "num_workers": _PROCESSES,
    "dataloader_num_workers": _PROCESSES,
    "devices": _PROCESSES,
    "num_gpus": _PROCESSES,
    "world_size": _PROCESSES,
    "accelerator": "write run.device: cuda",
    "output_dir": "write vitlab run FILE --out FOLDER",
    "default_root_dir": "write vitlab run FILE --out FOLDER",
    "eval_steps": _EVALUATIONS,
    "evaluation_strategy": _EVALUATIONS,
    "val_check_interval": _EVALUATIONS,
    "check_val_every_n_epoch": _EVALUATIONS,
    "torch_compile": "write run.engine: compiled",
    "torchcompile": "write run.engine: compiled",
    "grad_checkpointing": "write run.activation_checkpointing: blocks",
    "gradient_checkpointing": "write run.activation_checkpointing: blocks",
}
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
