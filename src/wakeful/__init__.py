"""Language models with no lazy layers, no attention sinks and no outliers."""

__version__ = "0.1.0"
