"""REV: units are put back to what they were before training."""
