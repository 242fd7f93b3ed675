"""Metrics and traces of a running run: the registry of metrics, and how they are set. Imports neither Ray nor
Prometheus.
"""
