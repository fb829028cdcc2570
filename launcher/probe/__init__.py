"""What runs under the trainer's Python: `run.py` is started in place of the training script.

It imports nothing of launch, and nothing of launch imports it; its settings arrive as JSON.
"""
