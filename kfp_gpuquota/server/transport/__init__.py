"""Below HTTP: TLS, Unix sockets, and limits of connections."""
