"""Components of the built-in models, one module or package per axis."""
