"""DeepSpeed configurations: their keys, how they are read and checked, and the settings that they come to here."""
