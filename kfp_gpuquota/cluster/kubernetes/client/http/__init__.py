"""HTTP to the API server: asynchronous and blocking clients, and their credentials."""
