"""GPUs that several pods share: reservations in the controller, and the memory agent on each node."""
