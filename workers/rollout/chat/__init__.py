"""Messages as text and token ids, as one model's chat template writes them."""
