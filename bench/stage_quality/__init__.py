"""Training over stages in one process: what skipping, swapping, coding and delay do to learning."""
