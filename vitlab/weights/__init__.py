"""Reading and writing of checkpoints of timm, torchvision, Hugging Face and Google.

The canonical form has timm's names and layouts: each of :data:`FORMATS` converts a library's tensors to and from it,
:func:`open_model` builds the model that a file belongs to, and :func:`convert` writes a file in another format.
Tensors that do not fit are refused by name, and omissions and assumptions are reported.
"""

from vitlab.weights.architecture import ModelFacts as ModelFacts
from vitlab.weights.conversion import Inspection as Inspection
from vitlab.weights.conversion import convert as convert
from vitlab.weights.conversion import inspect as inspect
from vitlab.weights.hub import fetch_by_name as fetch_by_name
from vitlab.weights.hub import named_weights as named_weights
from vitlab.weights.opening import FORMATS as FORMATS
from vitlab.weights.opening import open_checkpoint as open_checkpoint
from vitlab.weights.opening import open_model as open_model
from vitlab.weights.opening import open_pretrained as open_pretrained
from vitlab.weights.opening import published_digest as published_digest
