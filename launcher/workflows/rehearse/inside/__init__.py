"""What runs in the trainer's Python while a stage is rehearsed: nothing of launch is imported here."""
