"""Reading and writing of checkpoints of timm, torchvision, Hugging Face and Google.

The canonical form has timm's names and layouts: each of :data:`vitlab.weights.opening.FORMATS` converts a library's
tensors to and from it, :func:`vitlab.weights.opening.open_model` builds the model that a file belongs to, and
:func:`vitlab.weights.conversion.convert_weights_file` writes a file in another format.  Tensors that do not fit are
refused by name, and omissions and assumptions are reported.
"""
