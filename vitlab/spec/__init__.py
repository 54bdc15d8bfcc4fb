"""The format of a study file: frozen pydantic models, and YAML read with the line and column of every value.

This package defines the keys and types of the document only; :mod:`vitlab.registry` defines the components that exist
and their options.
"""

from vitlab.spec.choice import Choice
from vitlab.spec.run import RunSpec
from vitlab.spec.seeds import Seeds
from vitlab.spec.study import Analysis, Match, Rule, Study, Tune, read_study
from vitlab.spec.trial import STREAMS, TrainSpec, TrialSpec
from vitlab.spec.yaml import Document, read_document

__all__ = [
    "STREAMS",
    "Analysis",
    "Choice",
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
