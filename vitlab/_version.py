"""The version of vitlab."""

__version__ = "0.1.0"
