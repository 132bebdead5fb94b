"""How the types of SpeedLab look in IPython."""
