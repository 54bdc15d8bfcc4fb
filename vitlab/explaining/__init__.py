"""Explanations of trained models: attention and parameters of a Vision Transformer, and the logit of a class of any.

``capture`` records attention maps, even with fused kernels; ``measures`` computes numbers from them and from
parameters; ``attribution`` divides the logit of a class among patches; ``pictures`` draws these; ``one_image`` does all
of it for one image.
"""
