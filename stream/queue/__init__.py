"""What workers do on the server: stages and leases, feeding, evaluation, policy versions."""
