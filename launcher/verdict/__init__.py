"""What a run left -> `Evidence` -> points -> `Verdict`. Start with `judge.judge`."""
