"""Workers' processes on one machine: their shims, devices, environment, and shares of a GPU."""
