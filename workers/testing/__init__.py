"""An engine without a model, for tests."""
