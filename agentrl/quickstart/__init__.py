"""What the quick start makes on the spot: arithmetic problems, demonstrations, a small policy."""
