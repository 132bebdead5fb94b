"""The configuration panel: what a run will hold before it starts, and the words for a run that is on."""
