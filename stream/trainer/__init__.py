"""What a trainer needs: its lease on the run, the ledger, the archive, and the consumer built on them."""
