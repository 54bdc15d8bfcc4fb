"""The format of a study file: frozen pydantic models, and YAML read with the line and column of every value.

This package defines the keys and types of the document only; :mod:`vitlab.registry` defines the components that exist
and their options.
"""

from vitlab.spec.changes import read_study
from vitlab.spec.choice import Choice, ChoiceLike
from vitlab.spec.run import RunSpec, Seeds
from vitlab.spec.study import Analysis, Match, Rule, Study, Tune
from vitlab.spec.trial import STREAMS, TrainSpec, TrialSpec
from vitlab.spec.yaml import Document, read_document

__all__ = [
    "STREAMS",
    "Analysis",
    "Choice",
    "ChoiceLike",
    "Document",
    "Match",
    "Rule",
    "RunSpec",
    "Seeds",
    "Study",
    "TrainSpec",
    "TrialSpec",
    "Tune",
    "read_document",
    "read_study",
]
