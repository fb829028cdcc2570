"""One file for each upstream script that launch starts; its `SCRIPT` describes it.

Everything else asks that description. A further script is one more file here and its row in
`STAGES` of the backend (`open_instruct.py`, `trl.py`). What several scripts share stands in
`open_instruct_arguments.py` and `trl_arguments.py`.
"""
