"""Checks that detect unsupported patterns in a script before they give a wrong result."""
