"""SpeedLab in a notebook: magics, panel, dashboard, displays."""
