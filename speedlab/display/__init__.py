"""How numbers are shown: units, tables, colours, bars. Of nothing in particular: it imports nothing of ours."""
