"""The web page of the embedded cluster: its port, and what it shows."""
