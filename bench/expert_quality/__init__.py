"""Experts of domains, and what they say together, at equal compute with one model of the mix."""
