"""What an operator does and sees: status, audit, dead letters, control commands."""
