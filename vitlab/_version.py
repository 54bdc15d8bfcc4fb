"""The version of vitlab."""

__version__ = "0.2.0"
