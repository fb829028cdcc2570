"""A stage's rows as the model gets them: which tokens are trained on, what is cut and dropped.

The trainer's own preparation and collator make them, under the trainer's Python
(`workflows/rehearse`: its server and `inside/preview`). `preview` asks for them, `text` shows them.
Start reading at `preview.preview`.
"""
