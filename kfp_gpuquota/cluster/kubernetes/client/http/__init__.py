"""HTTP from the controller and the node agent to the API server: an asynchronous client, and its credentials."""
