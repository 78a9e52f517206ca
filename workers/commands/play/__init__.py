"""`penstock play`: play an environment against a model, without a run: no trainer, no Redis, no settings file."""
