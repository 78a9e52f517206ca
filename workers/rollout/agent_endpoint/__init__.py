"""Episodes of environments that run their own loop: they ask an endpoint for every turn of the model."""
