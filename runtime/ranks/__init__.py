"""Agreement between ranks: what each runs is compared over the store, and whoever fails, deviates or is gone is named on every rank."""
