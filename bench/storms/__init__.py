"""The storm of bench/storm.py, in parts."""
