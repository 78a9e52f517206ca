"""`penstock trace`: where a run's groups spent their time, for Perfetto and OpenTelemetry."""
