"""What the averaging methods do to the loss: arms, settings, replicas, exchanges, results."""
