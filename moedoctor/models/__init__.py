"""Shapes of models, read from a ``config.json``, and presets of the models that the catalogue is about."""
