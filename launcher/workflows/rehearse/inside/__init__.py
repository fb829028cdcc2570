"""What runs in the trainer's Python during a rehearsal; it imports nothing of launch."""
