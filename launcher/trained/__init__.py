"""What comes after training: the model that a run left, found, talked to, merged, sampled and
described.

`model.find_of_run` and `model.find_in_folder` find it; `worker.Worker` works with it under the
trainer's Python (`probe/models`).
"""
