"""The format of a study file: frozen pydantic models, and YAML read with the line and column of every value.

This package defines the keys and types of the document only; :mod:`vitlab.registry` defines the components that exist
and their options.
"""

from vitlab.spec.choice import Choice as Choice
from vitlab.spec.run import RunSpec as RunSpec
from vitlab.spec.seeds import Seeds as Seeds
from vitlab.spec.study import Analysis as Analysis
from vitlab.spec.study import Match as Match
from vitlab.spec.study import Rule as Rule
from vitlab.spec.study import Study as Study
from vitlab.spec.study import Tune as Tune
from vitlab.spec.study import read_study as read_study
from vitlab.spec.trial import STREAMS as STREAMS
from vitlab.spec.trial import TrainSpec as TrainSpec
from vitlab.spec.trial import TrialSpec as TrialSpec
from vitlab.spec.yaml import Document as Document
from vitlab.spec.yaml import read_document as read_document
