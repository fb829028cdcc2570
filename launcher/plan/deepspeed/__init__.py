"""The DeepSpeed configs that stage files name: zero1, zero2 (either _fp32_comm), zero3,
zero3_offload.

A ZeRO-3 has two: that with `_efficient_linear` is for layers that are not computed again
(`Stage.deepspeed`).
"""
