"""The dashboard of a run: the widget and the picture that stays in the notebook."""
