"""The ZeRO passes: units, shards, gathers, reductions and regions."""
