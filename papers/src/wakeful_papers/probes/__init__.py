"""Probes that exhibits alone ask for, a family of metrics a file."""
