"""Training over stages in one process: what skipping, coding and delay do to learning."""
