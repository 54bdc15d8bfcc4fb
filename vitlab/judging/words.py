"""Words by which tables of results are read: roles of columns, marks of lost trainings, goals of metrics."""

from __future__ import annotations

import re

from vitlab.spec.choice import Goal


def _set(words_in_text: str) -> frozenset[str]:
    return frozenset(words_in_text.split())


ROLES = {
    "seed": "seed|random seed|rng seed|global seed|manual seed|random state",
    "index": "|index|idx|id|row|run|rep|replicate|repeat|repetition|trial",
    "step": "step|steps|global step|trainer global step|epoch|epochs|iteration|iterations|iter|iters",
    "status": "status|state",
    "count": "n|runs|n runs|seeds|n seeds|num seeds|trials|n trials",
    "name": "name|run name|run id|experiment|group|job type|user|tags|notes|host|hostname|commit|sweep",
    "time": "time|date|timestamp|created|created at|updated|runtime|duration|wall time|relative time process|"
    "start time|end time",
}
"""Role of a column to its names, in lower case, without punctuation and groups such as ``config.``."""
ROLE_OF = {name: role for role, names in ROLES.items() for name in names.split("|")}
ENDS_OF_CHARTS = ("__MIN", "__MAX")  #: ends of names of columns in exports of charts

LOST = _set("failed failure crashed killed aborted error oom timeout preempted cancelled canceled lost")
DIVERGED = _set("diverged inf +inf -inf infinity")
FAILED = LOST | _set("- -- --- \u2013 \u2014 ? n.a. n/a #n/a na nan null none <na> missing") | {""}
"""Cells of a metric that say that a training has no value, in lower case."""
ENDED = _set("done finished complete completed success succeeded successful ok")
UNENDED = _set("running pending queued scheduled missing")
"""Cells of a status, beside ``LOST`` and ``diverged``."""
FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""Cells of a column that is called as one of ``LOST``, or diverged."""
STATISTICS = _set("mean avg average std stdev stddev sd sem se var variance median min max count sum total 25% 50% 75%")
"""Names of rows that sum up others."""

HIGHER = _set(
    "acc accuracy f1 auc auroc auprc iou miou dice precision prec recall sensitivity specificity psnr ssim bleu r2 mcc"
    " kappa throughput fps speedup"
)
LOWER = _set(
    "loss err error errors ece mce fid kid lpips wer cer nll perplexity ppl mse rmse brier latency time duration"
    " runtime flops macs params parameters memory"
)
"""Words that say by themselves in which direction a metric is better."""
QUALIFIERS: dict[str, Goal] = {**dict.fromkeys(("top1", "top3", "top5", "top10"), "max"), "mae": "min"}
"""Words that say so where no other word does; the last one counts: ``mae_top1`` is of a masked autoencoder."""
REVERSALS = _set(
    "drop gap degradation delta diff difference change gain std sd var variance per ratio rank neg negative inverse"
)
"""Words that may turn the direction of the others."""

ERRORS = _set("err error errors")
COUNTED = _set("acc accuracy top1 top3 top5 top10") | ERRORS
"""Words of metrics that count images."""
BELOW_1_PERCENT = ERRORS | _set("ece")
"""Words of shares that are below 1 % at times, so that their values do not tell shares from percents."""
SHARES = COUNTED | _set("f1 auc auroc auprc iou miou dice precision prec recall ece mce")
"""Words of metrics that are shares of one, or percent."""
PERCENT = _set("percent pct")


def words(name: str) -> list[str]:
    """Return the words of a name in lower case: ``valTop-1 Acc`` holds val, top1 and acc, ``lossless`` no loss."""
    joined = re.sub(r"(?<=[a-zA-Z])[\W_]+(?=[0-9])", "", name)
    parts = re.findall(r"[^\W_]+", joined)
    humps = re.findall(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*", joined)
    lower = [part.casefold() for part in (*parts, *humps)]
    return list(dict.fromkeys([*lower, *(word.rstrip("0123456789") for word in lower)]))


def role_of(name: str) -> str | None:
    """Return the role that a column has by its name; None for arms, metrics and everything else."""
    if name.endswith(ENDS_OF_CHARTS):
        return "step"
    if name.startswith("Unnamed: "):  # by pandas, where a header has no name
        return "index"
    last = re.split(r"[./]", name)[-1]
    return ROLE_OF.get(" ".join(re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", last).casefold())))
