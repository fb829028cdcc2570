"""One stage file judged, explained, mended: `Config` -> `Stage`.

Start with `stage.judge_stage_file`.
"""
