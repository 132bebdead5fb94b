"""The dashboard of a run: the live widget, and the static picture in the saved notebook."""
