"""Conversion between an ElasticJob's status and the controller's records. Pure."""
