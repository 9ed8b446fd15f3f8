"""Puts a server together from its settings, below HTTP: models with their engines, and the log store.

`source` finds the models and engines that a command line names. `service` makes everything from the settings, also for
apps without HTTP. `models` decides which models are loaded, and `served` is one of them.
"""
