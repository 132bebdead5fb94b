"""Read, convert and write configuration files of DeepSpeed."""
