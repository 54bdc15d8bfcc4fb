"""Every mistake in a tree of values, as a path and a plain sentence, not only those that pydantic reports first.

pydantic checks a rule across fields only if all fields are valid: a wrong value hides a wrong combination.  Here
misspelt keys get the nearest name first, which lets their values be checked as well; then wrong values are removed, and
the rest is validated again, until there are no new mistakes.  Rules on removed values are not checked.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from vitlab.errors import Path, closest, format_count, nearest
from vitlab.spec.tree import NewTree, Tree, deep_copy, value_at

M = TypeVar("M", bound=BaseModel)

CONFLICT = "conflict"  #: type of the pydantic errors that :func:`conflict_error` returns
NESTED = "nested"  #: type of the pydantic errors that carry the mistakes in a nested component

FORM = re.compile(
    r"<.*|constrained-\w+|int|float|str|bool|(tuple|list|dict|literal|lax-or-strict|is-instance|function-\w+)\[.*"
)
"""Names in pydantic's locations that stand for the forms of a union and are not keys of the document."""

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "sequence": "a list",
    "path": "a path",
    "callable": "a function",
}
"""Prefix of a pydantic error type to the expected type in words."""

EXAMPLES = {
    "study": "mine",
    "base": "{data: digits, model: {type: vit, patch_size: 2}, train: {epochs: 20}}; 'vitlab new study' writes one",
    "base.data": "digits",
    "base.model": "{type: vit, patch_size: 2}",
    "base.train": "{epochs: 20}",
}
"""Required key of a study to an example of its value."""

FORMS = {"run.keep": ["{every: N}"]}  #: key of a study to the forms that it may have beside names

YAML_HINT = ". YAML reads yes, no, on and off as true or false; put it in quotes"
"""End of a sentence on a boolean in the place of a text."""

PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$": "1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit",
    r"^\w+\.\w+$": "NAME.TAG, such as vit_tiny_patch16_224.augreg_in21k; 'vitlab list weights tiny' lists such names",
    r"^\w+_Weights\.\w+$": "MODEL_Weights.TAG, such as ViT_B_16_Weights.IMAGENET1K_V1",
    r"^[\w.-]+/[\w.-]+(@[\w.-]+)?$": "ORG/NAME or ORG/NAME@REVISION, such as google/vit-base-patch16-224",
    r"^\d+(-\d+)?$": "an index or a range of them, such as 3 or 0-5",
}
"""Patterns of texts in words; other patterns are shown unchanged."""


def conflict_error(message: str, *fields: str) -> PydanticCustomError:
    """Return the error of a rule across ``fields`` of one model, for its validators to raise."""
    return PydanticCustomError(CONFLICT, "{message}", {"message": message, "fields": fields})


@dataclass(frozen=True)
class Mistake:
    """One mistake in a tree of values."""

    path: Path
    message: str
    fields: tuple[str, ...] = ()  #: fields below ``path`` that the violated rule concerns
    rename: str | None = None  #: nearest allowed key, for an unknown key


@dataclass
class Collected(Generic[M]):
    """The result of :func:`collect_mistakes`."""

    tree: NewTree  #: sound values and stand-ins
    value: M | None = None  #: model of the sound values; None if too few are sound
    mistakes: list[Mistake] = field(default_factory=list)
    removed: set[Path] = field(default_factory=set)  #: paths of removed values
    written: dict[Path, Path] = field(default_factory=dict)  #: path in ``tree`` to a misspelt key in the document

    def document_path(self, path: Path) -> Path:
        """Return the path in the document of a path in ``tree``."""
        for new, old in reversed(self.written.items()):  # a key inside a misspelt key was renamed after that
            if path[: len(new)] == new:
                return (*old, *path[len(new) :])
        return path


def collect_mistakes(model: type[M], data: Tree, stand_ins: Tree = {}, who: str = "") -> Collected[M]:
    """Validate ``data`` and return every mistake in it.

    Args:
        model: the model to validate against.
        data: plain values.
        stand_ins: name to value for missing or wrong required fields, so that the rest can be validated.
        who: the component whose options these are; empty for other values.
    """
    collected = Collected[M](deep_copy(data))
    while True:
        try:
            collected.value = model.model_validate(collected.tree)
        except ValidationError as error:
            found = mistakes_in(error, model, who, collected.tree)
        else:
            return collected
        # Under the right names, the other mistakes are found again, and keys that seemed to be missing are there.
        misspelt = [mistake for mistake in found if _rename_misspelt_key(collected, mistake)]
        before = deep_copy(collected.tree)
        for mistake in misspelt or found:
            # A misspelt key whose value is of another kind may mean another name; the nearest need not take this value.
            if mistake.path not in collected.written and not _is_consequence(mistake, collected.removed):
                place = collected.document_path(mistake.path)
                collected.mistakes.append(replace(mistake, path=place))
        if misspelt:
            continue
        for mistake in found:
            _remove_or_replace_wrong_values(collected, mistake, stand_ins)
        if collected.tree == before:
            return collected


def _rename_misspelt_key(collected: Collected[Any], mistake: Mistake) -> bool:
    """Give a misspelt key the name that was meant, unless that is in use; return whether it has it now."""
    path, name = mistake.path, mistake.rename
    node = value_at(collected.tree, path[:-1])
    if not isinstance(node, dict) or name is None or name in node:
        return False
    place = collected.document_path(path)
    node[name] = node.pop(path[-1])
    collected.written[*path[:-1], name] = place
    return True


def _is_consequence(mistake: Mistake, removed: set[Path]) -> bool:
    """Return whether a mistake is a consequence of a removal."""
    concerned = [(*mistake.path, name) for name in mistake.fields]
    if not concerned:  # such as a mapping that is now empty, or a rule that names no fields
        concerned = [path for path in removed if path[: len(mistake.path)] == mistake.path]
    return any(path[: len(gone)] == gone for path in (mistake.path, *concerned) for gone in removed)


def _remove_or_replace_wrong_values(collected: Collected[Any], mistake: Mistake, stand_ins: Tree) -> None:
    """Remove the values that a mistake is about; put a stand-in where there is one for their key."""
    path, names = (mistake.path, mistake.fields) if mistake.fields else (mistake.path[:-1], mistake.path[-1:])
    holder = value_at(collected.tree, path)
    if isinstance(holder, dict):
        present = [name for name in names if name in holder]
        for name in present:
            del holder[name]
        # One that is a mistake itself, where this place has no such key, is removed in its turn.
        fresh = [name for name in names if (*path, name) not in collected.removed]
        stand_in = next((str(name) for name in fresh if name in stand_ins), None)
        if stand_in is not None:
            holder[stand_in] = deep_copy(stand_ins[stand_in])
        collected.removed.update((*path, name) for name in names)
        if present or stand_in is not None:
            return
    # A required key is missing, or the value is in a list, which is removed as a whole: its indices would shift.
    while path:
        holder = value_at(collected.tree, path[:-1])
        if isinstance(holder, dict) and path[-1] in holder:
            del holder[path[-1]]
            collected.removed.add(path)
            return
        path = path[:-1]


# -- sentences --------------------------------------------------------------------------------------------------------


def mistakes_in(error: ValidationError, model: type[BaseModel], who: str = "", data: Tree = {}) -> list[Mistake]:
    """Return each of pydantic's errors as a mistake; the arguments are as in :func:`collect_mistakes`."""
    mistakes = []
    for detail in _relevant_errors(error):
        kind, location, context = detail["type"], detail["loc"], detail.get("ctx", {})
        end = len(location) - (kind == "extra_forbidden")  # an unknown key may have the name of a form, such as 'int'
        keys = [part for at, part in enumerate(location) if at >= end or not FORM.fullmatch(str(part))]
        path = _path_as_written(keys, data)
        about = f"{who}: " if who else ""
        if kind == NESTED:
            mistakes += [Mistake((*path, *inner), sentence) for inner, sentence in context[NESTED]]
        elif kind == "extra_forbidden":
            mistakes.append(_unknown_key_mistake(path, model, who, detail["input"]))
        else:
            fields = tuple(context.get("fields", ())) if kind == CONFLICT else ()
            if len(fields) == 1:  # a rule of one field, which may hold in one model and not in another
                path, fields = (*path, *fields), ()
            mistakes.append(Mistake(path, about + _describe_error(detail, path), fields))
    return mistakes


def _path_as_written(keys: Sequence[str | int], value: Any) -> Path:
    """Return the keys without those of a long form that a shorthand stands for, such as ``seeds: 5``."""
    path: Path = ()
    for key in keys:
        # What is missing has all its keys.
        if value is None or isinstance(value, Mapping) or (isinstance(value, list) and isinstance(key, int)):
            path, value = (*path, key), value_at(value, (key,))
    return path


def _relevant_errors(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's errors, for a union only the errors of the form that the value most likely has."""
    groups: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for index, detail in enumerate(error.errors(include_url=False)):
        if detail["type"] == "too_short" and detail["input"]:
            continue  # its values are wrong and are reported themselves
        form = next((at for at, part in enumerate(detail["loc"]) if FORM.fullmatch(str(part))), None)
        groups.setdefault((index,) if form is None else ("form", *detail["loc"][:form]), []).append(detail)
    selected = []
    for group in groups.values():
        relevant = [detail for detail in group if not detail["type"].endswith(("_type", "_parsing"))]
        if not relevant and len(group) > 1:
            forms = " or ".join(dict.fromkeys(_expected_type(detail) or detail["msg"] for detail in group))
            relevant = [{**group[0], "type": "forms_type", "ctx": {"forms": forms}}]
        names = next((detail for detail in group if detail["type"] == "literal_error"), None)
        depth = max(len(detail["loc"]) for detail in group)
        deepest = [detail for detail in group if len(detail["loc"]) == depth]
        if names is not None and len(deepest) < len(group):  # the value has another form, with mistakes inside it
            relevant = deepest
        elif names is not None:  # names, or another kind of value
            others = [each for each in group if each is not names]
            tags = [str(each["loc"][-1]) for each in others]
            words = [
                tag[1:-1]
                if tag.startswith("<")
                else _expected_type(each) or each["msg"].replace("Input should be", "a number")
                for each, tag in zip(others, tags, strict=True)
            ]
            relevant = [{**names, "ctx": {**names["ctx"], "others": words}}]
        selected += relevant or group
    return selected


def _unknown_key_mistake(path: Path, model: type[BaseModel], who: str, value: Any) -> Mistake:
    """Return the mistake of an unknown key: one of another trainer, or a misspelt one."""
    key, allowed = str(path[-1]), _allowed_keys(path, model)
    how = foreign_option_hint(key)
    answer = re.search(r"\.(\w+): N\b", how)
    # A component's own options are nearer than what other trainers call so.
    close = closest(key, allowed) if who or not how else answer[1] if answer and answer[1] in allowed else None
    hint = how if close is None or f"{close}:" in how else f" Did you mean '{close}'?"
    if path[:1] == ("design",) and len(path) == 2 and "." in key:
        hint = f" Write one_at_a_time: {{{key}: [...]}}, or grid."
    if key.isdecimal() and value is None:  # as in {lr: 0,05}
        hint = " A comma ends a value; write a decimal point."
    if who and len(path) == 1:
        options = f"Options: {', '.join(allowed)}." if allowed else "It has no options."
        return Mistake(path, f"{who} has no option '{key}'.{hint} {options}", rename=close)
    options = f" Allowed here: {', '.join(allowed)}." if allowed else ""
    about = f"{who}: " if who else ""
    return Mistake(path, f"{about}unknown key '{key}'.{hint}{options}", rename=close)


def _describe_error(detail: ErrorDetails, path: Path) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    value = detail["input"]
    name = ".".join(map(str, path))
    if kind == "missing":
        example = EXAMPLES.get(name)
        return f"'{name}' is missing" + (f"; write it, such as {path[-1]}: {example}" if example else "")
    if kind in ("value_error", "assertion_error", CONFLICT):
        text = str(context.get("message", context.get("error", detail["msg"])))
        return f"{name}: {text}" if name else text
    if kind == "literal_error":
        expected = str(context["expected"])
        choices = re.findall(r"'([^']*)'", expected)
        allowed = (
            f"{', '.join([*choices, *(context.get('others', ()) or FORMS.get(name, []))]) or expected}."
            f"{foreign_option_hint(str(value)) or nearest(str(value), choices)}"
        )
        return f"{name}: found {value_in_words(value)}; allowed: {allowed}"
    if kind == "string_type" and isinstance(value, bool):
        return f"{name} must be a text; found {value_in_words(value)}{YAML_HINT}"
    actual = f"; found {value_in_words(value)}"
    if words := context.get("forms") or _expected_type(detail):
        return f"{name} must be {words}{actual}{_say_what_to_write(words, value, path)}"
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        words, bound = ("at least", "min_length") if kind.endswith("short") else ("at most", "max_length")
        unit = "character" if kind.startswith("string") else "value"
        return f"{name} must have {words} {format_count(context[bound], unit)}{actual}"
    if kind == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        return f"{name} must be {PATTERNS.get(pattern) or f'a text that matches {pattern}'}{actual}"
    message = detail["msg"]
    if (bound := message.removeprefix("Input should be ")) != message:
        return f"{name} must be {bound}{actual}"
    return f"{name}: {message[0].lower()}{message[1:]}{actual}"


def _say_what_to_write(words: str, value: Any, path: Path) -> str:
    """Return the end of a sentence on a value of a wrong type: what to write in its place, if that is known."""
    if words == "a list" and type(value) in (str, int, float) and path != ("where",):
        return f"; write [{value}]"
    if words == "a list" and isinstance(value, Mapping) and value and path[:1] == ("design",):
        if "log" in value:
            return "; only knobs of tune may be ranges: write the values"
        return f"; write {path[-1]}.{next(iter(value))}: [...]"
    if words.endswith("number") and isinstance(value, list):
        return "; values to compare belong in design"
    key = "design" if path[:1] == ("design",) else ".".join(part for part in path if isinstance(part, str))
    return f"; 'vitlab show {key}' describes it" if key and words == "a mapping" else ""


def _expected_type(detail: ErrorDetails) -> str:
    """Return in words the type that was expected; empty if the mistake is not a wrong type."""
    match = re.fullmatch("(.*?)_(type|parsing|parsing_size|str|from_float)", detail["type"])
    return KINDS.get(match[1], "") if match else ""


def value_in_words(value: Any) -> str:
    """Format a value for an error message: lists and mappings by kind, long text shortened."""
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    if not isinstance(value, str | int | float):
        return f"an object of type {type(value).__name__}"
    text = str(value) if isinstance(value, int) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _allowed_keys(path: Path, model: type[BaseModel]) -> list[str]:
    """Return the keys allowed in the mapping of the unknown key at ``path``, if a model defines them."""
    fields = dict(model.model_fields)
    for part in path[:-1]:
        if isinstance(part, str):
            forms = set(models_in(getattr(fields.get(part), "annotation", None)))
            fields = dict(forms.pop().model_fields) if len(forms) == 1 else {}
    return [info.alias or name for name, info in fields.items()]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation, such as of a list of models."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


# -- options and commands of timm, DeiT, transformers, Lightning and torchvision's references -------------------------

ANSWERS = {
    "write train.schedule: {type: cosine, warmup: 0.05, final: 0.01}, shares of the training and of the largest rate": (
        "warmup_epochs warmup_steps warmup_ratio warmup num_warmup_steps lr_warmup_epochs min_lr lr_min "
        "sched lr_scheduler_type t_max eta_min"
    ),
    "write train.schedule: {type: cosine, warmup: 0.05}, whose rate rises from nearly 0": "warmup_lr",
    "no schedule stays at its lowest rate; that of train.schedule: {type: wsd, cooldown: 0.1} falls at its end": (
        "cooldown_epochs"
    ),
    "write run.micro_batch_size: N to save memory; train.batch_size counts the images of a step": (
        "accum_iter grad_accum_steps gradient_accumulation_steps accumulate_grad_batches"
    ),
    "write train.ema: {decay: 0.9999}": "model_ema model_ema_decay ema_decay",
    "save the averaged weights of a checkpoint as a file of their own, and write checkpoint: FILE": "use_ema",
    "write train.optimizer: {type: adamw, lr: 1e-3, weight_decay: 0.05}, or train.optimizer.lr as a path": (
        "lr learning_rate weight_decay wd opt"
    ),
    "write train.optimizer: {type: adamw, lr: 1e-3}, the rate for your batch size; nothing scales it": (
        "base_lr blr lr_base"
    ),
    "write train.optimizer: {type: sgd, lr: 0.1, momentum: 0.9}": "momentum",
    "write train.optimizer: {type: adamw, betas: [0.9, 0.999], eps: 1e-8}": "opt_eps opt_betas adam_beta1 adam_beta2",
    "write seeds: 5 at the top level for replicates 0 to 4, or seeds: [7] for one": "seed random_seed",
    "write train.epochs: N": "num_epochs num_train_epochs max_epochs",
    "write train.steps: N": "max_steps max_iters total_steps",
    "write train.batch_size: N, the images of a step on all devices": "per_device_train_batch_size train_batch_size",
    "write data.size: 224, or data.image_size if the data set has that": "img_size image_size input_size",
    "write data.channels: 3": "in_chans",
    "the data decides the number of classes; data.classes: [0, 1] selects some": "num_classes nb_classes",
    "write model: {type: vit, dim: 192, depth: 12, heads: 3}, or size: Ti": (
        "embed_dim hidden_size num_heads num_attention_heads num_hidden_layers num_layers"
    ),
    "write model.mlp: {type: gelu, ratio: 4}, a multiple of dim": "mlp_ratio intermediate_size",
    "write drop as an option of model.head; model.drop_path: 0.1 is stochastic depth": "drop_rate drop_path_rate",
    "write model.attention: {type: auto, proj_drop: 0.1}, and model.mlp: {type: gelu, drop: 0.1}": (
        "proj_drop_rate hidden_dropout_prob"
    ),
    "softmax attention is model.attention: auto; 'vitlab show attention auto' describes it": "softmax mha mhsa",
    "write model.attention: {type: auto, drop: 0.1}": "attn_drop_rate attention_probs_dropout_prob",
    "write model.head: {type: linear, pool: gap}": "global_pool",
    "write train.loss: {type: cross_entropy, label_smoothing: 0.1}": "smoothing label_smoothing",
    "write train.mix: {mixup: 0.8, cutmix: 1.0, prob: 1.0}": "mixup cutmix mixup_alpha cutmix_alpha mixup_prob",
    "write data.augment: [flip, rand_augment, erasing], in this order; vitlab list augment shows all": (
        "aa auto_augment color_jitter hflip reprob random_erase"
    ),
    "write train.clip_grad: 1.0": "max_grad_norm gradient_clip_val",
    "write train.precision: bf16, or fp16": "amp bf16 fp16 mixed_precision",
    "write init_from: {timm: NAME} with a name from 'vitlab list weights', or {checkpoint: FILE}": (
        "pretrained finetune initial_checkpoint"
    ),
    "write design: {grid: {PATH: [VALUE, VALUE]}} in the study file, and type 'vitlab run FILE'": (
        "sweep sweeps param_grid m multirun vitlab_sweep vitlab_grid vitlab_ablate vitlab_multirun"
    ),
    "the page 'Coming from Hydra or W&B sweeps', docs/pages/coming/sweeps.md, writes such files as a study": (
        "program method parameters early_terminate defaults hydra"
    ),
    "the keys of a training are those of base.train, which 'vitlab show base.train' describes": "trainer class_path",
    "write data: {type: image_folder, root: ...}, as in docs/pages/coming/timm.md, 'Coming from timm's train.py'": (
        "data_dir data_path dataset_dir"
    ),
    "write run.tracker with the name of a tracker: mlflow, or wandb or tensorboard of the folder plugins": (
        "wandb log_wandb use_wandb tensorboard logger report_to"
    ),
    "write run.executor: {type: slurm, minutes: 60, sbatch: {partition: NAME}}; 'vitlab show slurm' has more": (
        "partition account qos time time_limit"
    ),
    "write compare: baseline, or compare: {to: {PATH: VALUE}}": "baseline",
    "write bonferroni; step-down methods and false discovery rates find what simultaneous intervals do not show": (
        "holm bh fdr fdr_bh benjamini_hochberg"
    ),
    "a run resumes by itself; give the same command again": "resume resume_from_checkpoint vitlab_resume",
    "write run.workers: N for trials at a time, or run.resources: {gpu: N} for one trial": (
        "devices num_gpus world_size gpus"
    ),
    "write run.threads: N; the CPU threads of a process also read its images": "num_workers dataloader_num_workers",
    "write run.device: cuda": "accelerator",
    "type 'vitlab run FILE --out FOLDER', 'vitlab report STUDY --format md > FILE' or 'vitlab export STUDY --to TO'": (
        "output_dir default_root_dir output out vitlab_output vitlab_o"
    ),
    "'vitlab plan FILE' shows what 'vitlab run FILE' would train; 'vitlab gc' deletes nothing without --yes": (
        "dry_run dryrun vitlab_dry_run vitlab_dryrun"
    ),
    "a finished trial is not trained again; --retry-failed repeats failed ones, a new folder of --out all": (
        "force overwrite"
    ),
    "FILE is an argument, as in 'vitlab run FILE'": "config config_file",
    "type 'vitlab run FILE'": "vitlab_train vitlab_fit vitlab_start",
    "write tune: {knobs: {PATH: [VALUE, VALUE]}} in the study file, and type 'vitlab run FILE'": (
        "vitlab_tune vitlab_search vitlab_optimize vitlab_hpo"
    ),
    "Ctrl-C stops a run, 'kill PID' one in the background: 'vitlab status' names its process; its command resumes it": (
        "vitlab_kill vitlab_stop vitlab_cancel vitlab_abort vitlab_pause"
    ),
    "'vitlab run FILE' evaluates, too; 'vitlab report STUDY' prints the values": (
        "vitlab_eval vitlab_evaluate vitlab_test vitlab_results"
    ),
    "'vitlab new study FILE' writes a study file": "vitlab_init vitlab_create",
    "delete the folder studies/NAME in the output folder; 'vitlab gc --yes' then deletes what no study needs": (
        "vitlab_rm vitlab_delete vitlab_remove vitlab_clean"
    ),
    "messages have one level; 'vitlab logs STUDY' prints what a trial wrote, 'vitlab --version' the version": (
        "vitlab_v vitlab_verbose vitlab_debug vitlab_quiet vitlab_q"
    ),
    "type 'vitlab list' for components, 'vitlab studies' for studies": "vitlab_ls",
    "type 'vitlab --help', or 'vitlab COMMAND --help'": "vitlab_help",
    "type 'vitlab --version'": "vitlab_version",
    "type --metric COLUMN": "judge_value judge_column judge_score",
    "type --arm COLUMN": "judge_by judge_group judge_model judge_method",
    "type --block COLUMN": "judge_dataset judge_fold",
    "type --baseline ARM": "judge_control judge_reference judge_ref",
    "type --format md > FILE, or another format": "judge_o judge_output judge_out judge_f",
    "type --goal max, or --goal min": "judge_maximize judge_minimize judge_higher_is_better judge_lower_is_better",
    "type --alpha 0.05 for intervals of 95 %": "judge_confidence judge_ci",
    "write train.stop_early: {patience: N}, in evaluations": "early_stopping early_stopping_patience",
    "write run.keep: best, or run.keep: {every: N}": "save_top_k save_total_limit save_steps",
    "write train.evaluations: N, the number of evaluations": (
        "eval_steps evaluation_strategy val_check_interval check_val_every_n_epoch"
    ),
    "write run.engine: compiled": "torch_compile torchcompile",
    "write run.activation_checkpointing: blocks": "grad_checkpointing gradient_checkpointing",
}
"""What to write for words of other trainers; ``vitlab_`` begins those of any command, ``judge_`` those of judge."""

HOW = {name: how for how, names in ANSWERS.items() for name in names.split()}
"""Option or command of another trainer to what is written instead."""

_SIZE = {"tiny": "Ti", "giant": "g"}  #: sizes that are not written as the first letter, in upper case
_TIMM = re.compile(
    r"(?:\w+/)?(?:vit|deit3?)[_-](tiny|small|medium|base|large|huge|giant|gigantic)[_-](?:\w+[_-])?patch(\d+)(?:[_.-].*)?"
)
_TORCHVISION = re.compile(r"vit_([blh])_(\d+)")


def foreign_option_hint(name: str) -> str:
    """Return in a sentence what to write for an option of another trainer; empty for any other name."""
    how = HOW.get(name.lower().replace("-", "_"), "")
    return f" {how[0].upper()}{how[1:]}." if how else ""


def foreign_model_hint(model: str) -> str:
    """Return in a sentence how a study file names a ViT of timm, transformers or torchvision; empty for any other name.

    Examples: ``deit_small_patch16_224``, ``google/vit-base-patch16-224``, ``vit_b_16``.
    """
    match = _TIMM.fullmatch(model) or _TORCHVISION.fullmatch(model)
    if match is None:
        return ""
    size = _SIZE.get(match[1], match[1][0].upper())
    return (
        f" Write model: {{type: vit, size: {size}, patch_size: {match[2]}}}, and for its weights init_from: "
        "{timm: NAME}, of 'vitlab list weights', or {checkpoint: FILE}."
    )
