"""What a run left (`Evidence`), judged by points: a `Verdict`. Start with `judge.judge_run`."""
