"""Schedule passes: they move whole collectives between regions and never split a region."""
