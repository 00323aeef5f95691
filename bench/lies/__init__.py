"""What lies cost in learning: liars among peers that average (bench/hostile.py)."""
