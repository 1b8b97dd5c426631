"""What a script must not do, found and named before it gives a wrong result."""
