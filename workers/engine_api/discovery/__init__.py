"""Which engines a run has: `EngineDiscovery`, from settings, DNS and the operator's list, and their URLs."""
