"""Explanations of a trained Vision Transformer: its attention and its parameters.

``capture`` records attention maps, even with fused kernels; ``measures`` computes numbers from them and from
parameters; ``attribution`` divides the logit of a class among patches; ``pictures`` draws these; ``one_image`` does all
of it for one image.
"""
