"""What comes after training: the model that a run left, found, talked to, merged, sampled and
described.

`model.of_run` and `model.of_folder` find it; `worker.Worker` works with it under the trainer's
Python (`probe/models`).
"""
