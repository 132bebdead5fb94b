"""The panel: a form for the configuration, predictions, and control of a run."""
