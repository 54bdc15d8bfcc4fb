"""Explanations of a trained Vision Transformer: its attention and its parameters.

``capture`` records attention maps, even with fused kernels; ``measures`` computes numbers from them and from
parameters, and compares the features of two models; ``pictures`` plots these; ``one_image`` does all of it for one
image.
"""
