"""Explanations of a trained Vision Transformer: its attention and its parameters.

``capture`` records attention maps, even with fused kernels; ``rollout`` and ``probes`` compute numbers
from them and from parameters; ``pictures`` plots these; ``one_image`` does all of it for one image.  ``similarity``
compares the features of two models.
"""
