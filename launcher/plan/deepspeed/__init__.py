"""The DeepSpeed configs that stage files name: zero1, zero2 (either _fp32_comm), zero3, zero3_offload."""
