"""Seeing inside a trained Vision Transformer: what it attends to, and what its parameters have become.

``capture`` records attention maps in spite of fused kernels; ``rollout``, ``distance`` and ``probes`` turn them and
the parameters into numbers; ``pictures`` draws them; ``explain`` does all of it for one image.
"""
