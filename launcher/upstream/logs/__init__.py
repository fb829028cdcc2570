"""What the trainers print, as patterns."""
