"""The DeepSpeed configs that stage files name: zero2, zero2_fp32_comm, zero3, zero3_offload."""
