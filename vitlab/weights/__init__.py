"""Weights in and out: the files of timm, DeiT, torchvision, Hugging Face and Google, and what vitlab makes of them.

The common language is the canonical one, timm's names and layouts: a :class:`Format` says how a library's file is read
into it and written from it, :func:`open_model` builds the model that a file belongs to, and :func:`convert` writes
another file.  Strict throughout: what does not fit is refused by name, and what is left out or assumed is said.
"""

from __future__ import annotations

from vitlab.weights.conversion import Inspected as Inspected
from vitlab.weights.conversion import convert as convert
from vitlab.weights.conversion import inspect as inspect
from vitlab.weights.known import ModelFacts as ModelFacts
from vitlab.weights.names import Format as Format
from vitlab.weights.opening import FORMATS as FORMATS
from vitlab.weights.opening import Opened as Opened
from vitlab.weights.opening import open_model as open_model
from vitlab.weights.opening import read as read
from vitlab.weights.pretrained import open_pretrained as open_pretrained
