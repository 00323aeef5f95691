"""`make demo`: four real peers train a small model on this machine, then one trains alone."""
