"""Rules about TRL's sft and dpo scripts. What only the trainer can say is left to the rehearsal."""
